"""Log lines of a process: for people, or one JSON object a line (`--log-format json`); one event is one line.

Owns: both formats, and where uncaught exceptions and warnings go. Does not know: who logs what.

What clients make up (names, paths, the text of an exception) comes into messages, so control characters are escaped:
nobody forges a line, nor moves a reader's cursor. A message may bring `extra={"fields": {...}}`: further keys of its
JSON object.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, TextIO

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["human", "json"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_CONTROL_IN_LINES = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_WITHHELD = "(its text may quote a prompt and is left out; --log-prompts logs it)"

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def setup(level: LogLevel, log_format: LogFormat, process: str, *, exception_texts: bool = True) -> None:
    """Everything that this process logs goes to stderr, with `process` in each line.

    Without `exception_texts`, a traceback has types and places, and no text that an exception was raised with.
    """
    handler = logging.StreamHandler()
    handler.setFormatter((JsonLines if log_format == "json" else HumanLines)(process, exception_texts))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    sys.excepthook = lambda *error: _uncaught(error)
    threading.excepthook = lambda hook: _uncaught((hook.exc_type, hook.exc_value, hook.exc_traceback))
    sys.unraisablehook = lambda hook: _uncaught((hook.exc_type, hook.exc_value, hook.exc_traceback))


def tell(prog: str, text: str, *, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """What a command says for itself, whatever its log level: `prog: text` for people, on stderr or `stream`; a log
    event where logs are JSON, so that all of a process's lines are."""
    handlers = _json_handlers()
    for handler in handlers:
        handler.handle(logging.LogRecord(prog, level, "", 0, text, None, None))
    if not handlers:
        print(f"{prog}: {text}", file=stream or sys.stderr, flush=True)


def writes_json() -> bool:
    """Whether this process's logs are JSON, so that nothing else may come between their lines."""
    return bool(_json_handlers())


def _json_handlers() -> list[logging.Handler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler.formatter, JsonLines)]


class HumanLines(logging.Formatter):
    """`12:00:01 W engine: the message`; a traceback follows, indented."""

    def __init__(self, process: str, exception_texts: bool = True) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {process}: %(message)s", datefmt="%H:%M:%S")
        self._exception_texts = exception_texts

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _message(record, self._exception_texts)
        return _CONTROL.sub(_escaped, super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        lines = _CONTROL_IN_LINES.sub(_escaped, _traceback(ei, self._exception_texts)).split("\n")
        return "\n".join(f"    {line}" for line in lines)


class JsonLines(logging.Formatter):
    """One object an event: time, level, process, logger, message, the message's own fields, exception."""

    def __init__(self, process: str, exception_texts: bool = True) -> None:
        super().__init__()
        self._process = process
        self._exception_texts = exception_texts

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": _message(record, self._exception_texts),
        }
        if record.exc_info:
            event["exception"] = _traceback(record.exc_info, self._exception_texts)
        fields = getattr(record, "fields", {})
        return json.dumps({**event, **fields, **event}, default=str)  # ours come first, and are not replaced


def _message(record: logging.LogRecord, exception_texts: bool) -> str:
    """The message; beside an exception whose text is withheld its first line, as asyncio shows the exception below."""
    message = record.getMessage()
    return message.partition("\n")[0] if record.exc_info and not exception_texts else message


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def _traceback(exc_info: ExcInfo, with_texts: bool) -> str:
    error = exc_info[1]
    if error is None:
        return ""
    if with_texts:
        return "".join(traceback.format_exception(error)).rstrip("\n")
    parts = [
        "".join(traceback.format_tb(link.__traceback__)) + f"{type(link).__module__}.{type(link).__qualname__}"
        for link in _causes(error)
    ]
    return "\nwhich was raised while handling\n".join(parts) + f" {_WITHHELD}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, what it was raised from, and so on."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _uncaught(error: Any) -> None:
    if error[0] is not None and issubclass(error[0], KeyboardInterrupt | SystemExit):
        return
    logging.getLogger("coldblock").critical("uncaught exception", exc_info=error)
