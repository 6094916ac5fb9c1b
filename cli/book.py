"""How a command gets the book."""

from __future__ import annotations

from jayrun import embedded
from jayrun.errors import BookUnreachable
from jayrun.settings import Settings
from jayrun.store import schema
from jayrun.store.engine import address
from jayrun.store.transactions import Book


def open_book(settings: Settings, *, role: str = "cli", start: bool = False, patience_seconds: float = 0) -> Book:
    """The book that applies, for the caller to close. Looks only, unless `start`: then a server of jayrun's own is
    started, and its book made, when needed.

    `patience_seconds`: how long lost connections are tried again. Raises `BookUnreachable` with what to run, and
    `SchemaMismatch`.
    """
    found = embedded.ensure(settings) if start else embedded.locate(settings)
    if not found.running:
        raise BookUnreachable(_not_running(found, settings))
    if start and found.kind != "url":
        schema.create_if_missing(found.url)
    book = Book(found.url, role=role, patience_seconds=patience_seconds)
    try:
        book.read(schema.check_revision)
    except BaseException:
        book.close()
        raise
    return book


def _not_running(found: embedded.BookAddress, settings: Settings) -> str:
    if found.kind == "url":
        return f"no server answers at {address(found.url)}: start it, or check JAYRUN_DATABASE_URL"
    how = "`jayrun db up`" if embedded.may_manage(settings) else "`sudo jayrun db up`"
    return f"the server in {found.place} is not running: start it with {how}"
