"""A disk that fails: the Nth thing that is asked of it, once or from then on."""

import errno
import os
from contextlib import contextmanager

CALLS = ("open", "fsync", "replace", "unlink", "mkdir", "rmdir", "fchmod")


@contextmanager
def failing(nth, calls=CALLS, number=errno.ENOSPC, forever=False):
    """The `nth` of these calls (from 1) fails, or all from it on; gives a list that has an entry for each failure."""
    real = {name: getattr(os, name) for name in calls}
    count, failures = 0, []

    def wrap(name):
        def call(*args, **options):
            nonlocal count
            count += 1
            if count == nth or (forever and count > nth):
                failures.append(name)
                raise OSError(number, os.strerror(number), str(args[0]))
            return real[name](*args, **options)

        return call

    try:
        for name in calls:
            setattr(os, name, wrap(name))
        yield failures
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def every_failure(act, **options):
    """Let the first call that `act` makes fail, then the second, until none does; yields call and exception."""
    nth = 0
    while True:
        nth += 1
        problem = None
        with failing(nth, **options) as failures:
            try:
                act()
            except Exception as raised:  # what it is, the caller judges
                problem = raised
        if not failures:
            return
        yield failures[0], problem
