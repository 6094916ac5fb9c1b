"""The book: every SQL statement lives here."""
