"""Whose book applies, and the address it is given."""

from __future__ import annotations

import re

import pytest
from embedded_helpers import ROOT, Room
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import make_url

from jayrun import embedded
from jayrun.embedded.places import Place
from jayrun.errors import BookUnreachable, ServerError
from jayrun.settings import Settings

NOBODY_LISTENS = "postgresql://me:secret@127.0.0.1:1/db"


def test_a_url_wins_and_is_never_ours_to_start_or_stop(room: Room) -> None:
    settings = room.settings(JAYRUN_DATABASE_URL=NOBODY_LISTENS)
    assert embedded.locate(settings) == embedded.BookAddress(NOBODY_LISTENS, "url", False, None)
    assert embedded.ensure(settings).kind == "url"  # whether it answers, the connection will tell, with the reason
    with pytest.raises(BookUnreachable, match="JAYRUN_DATABASE_URL"):
        embedded.up(settings)
    with pytest.raises(ServerError, match="not jayrun's to stop"):
        embedded.down(settings)
    assert not embedded.may_manage(settings)
    found = embedded.status(settings)
    assert (found.server_version, found.data_folder, found.log_file) == (None, None, None)


def test_a_url_that_answers_is_running(made: Room) -> None:
    book = embedded.up(made.settings())
    driver = book.url.replace("postgresql://", "postgresql+psycopg://")
    settings = made.settings(JAYRUN_DATABASE_URL=driver)
    assert embedded.up(settings) == embedded.BookAddress(book.url, "url", True, None)
    assert embedded.status(settings).server_version is not None


@pytest.mark.parametrize(
    "url",
    [
        "mysql://me:s3cret@x/y",
        "host=/run password=s3cret dbname=x",
        "host=/run password = 's3 cret' dbname=x",
        "postgresql",
        "postgresql://me:s3cret@here:port/x",
        "postgresql://me:s3cret@[::1/x",
        "postgresql://me:s3cret%zz@here/x",
        "postgresql://me:s3@cret@here:1,there:2/x",
        "postgresql://here/x?no-such-parameter=1&password=s3cret",
    ],
)
def test_what_is_not_a_postgresql_url_is_refused(url: str) -> None:
    with pytest.raises(embedded.NotADatabaseUrl, match="must look like postgresql://") as refused:
        embedded.locate(Settings(database_url=url))
    assert not re.search("s3|cret", str(refused.value))
    assert url[-2:] in str(refused.value)


def test_home_then_host_then_private(room: Room) -> None:
    outside = Settings.load(room.environment)
    assert embedded.locate(room.settings()).kind == "home"
    assert embedded.locate(outside).kind == ("host" if ROOT else "private")
    (room.folder / "state" / "data").mkdir(parents=True)
    assert embedded.locate(outside).kind == "host"
    assert embedded.locate(room.settings()).kind == "home"


def test_a_home_that_is_a_file_is_an_error_that_says_so(room: Room) -> None:
    room.home.write_text("")
    assert not embedded.locate(room.settings()).running
    for settings in (room.settings(), room.settings(JAYRUN_HOME=str(room.home / "below"))):
        for act in (embedded.ensure, embedded.up, embedded.down):
            with pytest.raises(ServerError, match=f"{room.home} is a file"):
                act(settings)
        assert not embedded.status(settings).book.running
        assert not embedded.may_manage(settings)


def test_libpq_and_sqlalchemy_read_the_same_address(room: Room) -> None:
    place = Place.at("home", room.folder / "a b%&?c")
    libpq = conninfo_to_dict(place.url())
    assert libpq == {
        "user": "jayrun",
        "dbname": "jayrun",
        "host": str(place.sockets),
        "port": "5432",
        "options": "-cTimeZone=UTC",
    }
    parsed = make_url(place.url())
    assert (parsed.username, parsed.database) == ("jayrun", "jayrun")
    assert parsed.query["host"] == str(place.sockets)
    assert parsed.query["port"] == "5432"


def test_a_url_may_name_several_hosts() -> None:
    url = "postgresql://me@/book?host=one,two&port=5432,5433"
    assert embedded.locate(Settings(database_url=url)).url == url
    with pytest.raises(embedded.NotADatabaseUrl):
        embedded.locate(Settings(database_url="postgresql://me@/book?host=one,two&port=5432,x"))
