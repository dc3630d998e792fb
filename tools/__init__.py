"""Commands around the daemons: supervise, chat, watch, fetch, convert, benchmark."""
