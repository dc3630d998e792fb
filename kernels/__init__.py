"""Operations on tensors: references in plain torch, and from the CUDA work on their native kernels."""
