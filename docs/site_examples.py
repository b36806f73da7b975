"""Shows examples of docstrings as code, and help texts of fields, on the page of the API."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n|$).*)*", re.MULTILINE)
"""From the first prompt to the next empty line."""
HELP = re.compile(r"""(?:About\(|description=)(["'])(.*?)(?<!\\)\1""", re.DOTALL)
"""What a field of a task or of a configuration says about itself."""


class Examples(griffe.Extension):
    """Puts a fence around each example."""

    def on_object(self, *, obj: Any, **others: Any) -> None:
        """Rewrites the text of one docstring."""
        help_text = HELP.search(str(obj.value)) if obj.is_attribute and obj.value else None
        if obj.docstring is None and help_text is not None:
            obj.docstring = griffe.Docstring(help_text[2], parent=obj)
        if obj.docstring is not None:
            text = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
