"""Numbers and spans of time as people read them."""

from collections.abc import Mapping


def format_gain(contribution: float | None, error: float | None) -> str:
    """A contribution with its standard error, for people."""
    if contribution is None or error is None:
        return "not measured"
    return f"{contribution:+.4f} ± {error:.4f}"


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    whole_minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(whole_minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def describe_drawn(drawn: Mapping[str, float]) -> str:
    """What a host has drawn.

    >>> describe_drawn({"examples": 1240, "noise": 0.2, "width": 4})
    'examples 1,240, noise 0.2, width 4'
    """
    return ", ".join(f"{name} {format_count(value)}" for name, value in drawn.items())


def format_count(value: float) -> str:
    """A number with its thousands apart, and as few digits as it has.

    >>> format_count(1000), format_count(0.05)
    ('1,000', '0.05')
    """
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"
