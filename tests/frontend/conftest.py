"""Fixtures over the frontend kit of tests/fakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from coldblock.frontend.tokenization import ModelText
from frontend_kit import Server, byte_tokenizer, fake_engine, serving, write_model
from tokenizers import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def model_text(model_folder: Path) -> ModelText:
    return ModelText.load(model_folder)


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[Server]:
    """A frontend whose engine answers everything with "hello"; tests that need another start their own."""
    with fake_engine(model_folder) as engine, serving(engine) as running:
        running.wait_for_health(200)
        yield running
