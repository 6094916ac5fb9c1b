"""How a command gets the book."""

from __future__ import annotations

from contextlib import suppress

from jayrun import embedded
from jayrun.errors import BookBusy, BookDenied, BookUnreachable
from jayrun.settings import Settings
from jayrun.store import schema
from jayrun.store.transactions import Book


def open_book(settings: Settings, *, role: str = "cli", start: bool = False, patience_seconds: float = 0) -> Book:
    """The book that applies, for the caller to close. Looks only, unless `start`: then a server of jayrun's own is
    started, and its book made, when needed.

    `patience_seconds`: how long lost connections are tried again. Raises `BookUnreachable` with what to run, and
    `SchemaMismatch`.
    """
    found = running_book(settings, start=start)
    if start and found.kind != "url":
        schema.create_if_missing(found.url)
    book = Book(found.url, role=role, patience_seconds=patience_seconds)
    try:
        book.read(schema.check_revision)
    except BaseException as error:  # no connection is left behind, whatever came between
        book.close()
        if isinstance(error, BookUnreachable):
            reason = str(error).partition("\n")[0]
            raise BookUnreachable(f"{reason}\n{_remedy(found)}") from None
        raise
    return book


def open_judged(settings: Settings) -> Book:
    """The book for a listing, for the caller to close: this host's dead are ended first, so that none is shown as live.

    Where that is refused, or too much is going on, the listing shows what there is.
    """
    from jayrun.runtime import reconciler
    from jayrun.store import holders

    book = open_book(settings)
    try:
        with suppress(BookDenied, BookBusy):
            host_id = holders.find_own_host(book, settings.host_id)
            if host_id is not None:
                reconciler.run_pass(book, host_id)
    except BaseException:  # likewise
        book.close()
        raise
    return book


def running_book(settings: Settings, *, start: bool) -> embedded.BookAddress:
    """Where the book that applies is, its server running. Raises `BookUnreachable` with what to run."""
    found = embedded.ensure(settings) if start else embedded.locate(settings)
    if not found.running:
        if found.kind == "url":
            raise BookUnreachable(f"no server answers at {embedded.without_password(found.url)}: {_remedy(found)}")
        raise BookUnreachable(embedded.how_to_start(settings))
    return found


def _remedy(found: embedded.BookAddress) -> str:
    if found.kind == "url":
        return "start that server, or check JAYRUN_DATABASE_URL; `jayrun doctor` tells more"
    return "`jayrun doctor` tells more about jayrun's own server"
