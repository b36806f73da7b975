"""Finds the code of a fault in one function and puts the mistake in its place.

Code is compared as syntax: its layout, quotes and comments do not matter. A pattern is one
expression, one statement, or several statements that follow each other. The head of a block is
written with three dots for the block: "if is_kept: ..." fits whatever is done then. An expression
that is a whole statement may give way to another statement.
"""

import ast
import copy
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

Code = ast.expr | list[ast.stmt]


@dataclass(frozen=True)
class Span:
    """Where a piece of code stands in its file: lines from 0, columns in bytes."""

    first_line: int
    first_column: int
    last_line: int
    last_column: int
    kind: str
    """expression, statements or head"""


def plant(source: str, function: str, old: str, new: str) -> str:
    """The source with `new` where `old` stands in the function; it must stand there once."""
    spans = find(source, function, old)
    if len(spans) != 1:
        raise LookupError(f"{len(spans)} times in {function or 'the file'}: {old}")
    (span,) = spans
    lines = source.encode().splitlines(keepends=True)
    before = lines[span.first_line][: span.first_column]
    after = lines[span.last_line][span.last_column :]
    if span.kind == "expression" and isinstance(read(new), ast.expr):
        mistake = f"({new})".encode()
    elif span.kind == "head":
        head = ast.unparse(read(new)).removesuffix("...").rstrip()
        mistake = f"{head}\n{' ' * span.last_column}".encode()
    else:
        mistake = textwrap.indent(new, " " * span.first_column).lstrip().encode()
    lines[span.first_line : span.last_line + 1] = [before + mistake + after]
    planted = b"".join(lines).decode()
    ast.parse(planted)
    return planted


def find(source: str, function: str, old: str) -> list[Span]:
    """Every place in the function at which the code of `old` stands."""
    pattern = read(old)
    found = []
    for scope in scopes(ast.parse(source), function):
        for code in pieces(scope, pattern):
            if is_head(pattern):
                if dump(headless(code)) == dump(pattern):
                    found.append(span_of_head(code))
            elif dump(code) == dump(pattern):
                found.append(span_of(code))
    return found


def is_head(pattern: Code) -> bool:
    """Whether the pattern is one compound statement with three dots for its block."""
    if not isinstance(pattern, list) or len(pattern) != 1 or not hasattr(pattern[0], "body"):
        return False
    dots = "Expr(value=Constant(value=Ellipsis))"
    return [ast.dump(node) for node in pattern[0].body] == [dots]


def headless(code: list[ast.stmt]) -> Code:
    """A compound statement with three dots for its blocks; any other statement as it is."""
    (statement,) = code
    if not hasattr(statement, "body"):
        return code
    short = copy.copy(statement)
    short.body = [ast.Expr(ast.Constant(...))]
    if hasattr(short, "orelse"):
        short.orelse = []
    return [short]


def span_of_head(code: list[ast.stmt]) -> Span:
    """From the beginning of a compound statement to its block."""
    (statement,) = code
    block = statement.body[0]
    return Span(
        first_line=statement.lineno - 1,
        first_column=statement.col_offset,
        last_line=block.lineno - 1,
        last_column=block.col_offset,
        kind="head",
    )


def read(text: str) -> Code:
    """An expression, if the text is one, else its statements."""
    body = ast.parse(text).body
    if len(body) == 1 and isinstance(body[0], ast.Expr):
        return body[0].value
    return body


def scopes(tree: ast.Module, function: str) -> list[ast.AST]:
    """The function or class of that name, as Class.method; the whole file without a name."""
    found: list[ast.AST] = [tree]
    for name in filter(None, function.split(".")):
        found = [node for scope in found for node in defined_in(scope) if node.name == name]
    return found


def defined_in(scope: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and classes of a scope, not those within them."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            yield from defined_in(node)


def pieces(scope: ast.AST, pattern: Code) -> Iterator[Code]:
    """All code of the scope that could be the pattern: expressions, or runs of statements."""
    if isinstance(pattern, ast.expr):
        yield from (node for node in ast.walk(scope) if isinstance(node, type(pattern)))
        return
    for node in ast.walk(scope):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                for start in range(len(block) - len(pattern) + 1):
                    yield block[start : start + len(pattern)]


def dump(code: Code) -> str:
    """Syntax as text; whether a name is read or assigned to does not count."""
    nodes = code if isinstance(code, list) else [code]
    text = " ".join(ast.dump(node) for node in nodes)
    return text.replace("ctx=Store()", "ctx=Load()").replace("ctx=Del()", "ctx=Load()")


def span_of(code: Code) -> Span:
    first, last = (code[0], code[-1]) if isinstance(code, list) else (code, code)
    return Span(
        first_line=first.lineno - 1,
        first_column=first.col_offset,
        last_line=last.end_lineno - 1,
        last_column=last.end_col_offset,
        kind="statements" if isinstance(code, list) else "expression",
    )
