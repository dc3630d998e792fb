"""`coldblock top`: the engine's state, live in the terminal or as plain text.

`main` is the command, `feed` listens to the engine, `history` remembers what was heard, `columns` and `panels` say what
is shown of it, `plain` prints that, `app` and `widgets` draw it on a terminal. Only the last two need textual.
"""
