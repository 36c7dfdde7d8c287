"""The mutants of a module: operators of cosmic-ray, and three of our own.

Of cosmic-ray's operators those are used that change what is done: conditions, comparisons,
booleans, numbers, loops, exceptions, decorators, and one replacement per arithmetic or bit
operator (cosmic-ray knows eleven, of which most raise TypeError on the first call). Our own
leave out a statement, leave out one of several error numbers, and turn a return value into None.

Not mutated, because nothing could tell: annotations, docstrings, log lines, texts of errors,
imports, `dataclass` and its options, ``__slots__``, and the figures of module constants (an attempt
more or less breaks no promise).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.plugins import get_operator

__all__ = ["Mutant", "mutants"]

_OPERATORS = (
    "AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr",
    "ReplaceOrWithAnd", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak",
    "ExceptionReplacer", "NumberReplacer", "RemoveDecorator", "ZeroIterationForLoop",
    "ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_USub_UAdd",
    *(f"ReplaceComparisonOperator_{a}" for a in (
        "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is", "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt",
        "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt",
    )),
    *(f"ReplaceBinaryOperator_{a}" for a in (
        "Add_Sub", "Sub_Add", "Mul_FloorDiv", "Div_Mul", "FloorDiv_Mul", "Mod_Mul", "Pow_Mul",
        "LShift_RShift", "RShift_LShift", "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitOr",
    )),
)  # fmt: skip
#: cosmic-ray puts a name there that is not defined, which would turn every exception that
#: comes by into a NameError. This one is never raised here.
_NEVER = ("CosmicRayTestingException", "StopAsyncIteration")

_STATEMENTS = (
    *(ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Delete),
    *(ast.Return, ast.Break, ast.Continue),
)

Position = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a module.

    Attributes:
        operator: its name.
        function: qualified name of the function that is changed; empty at module level.
        line: where, from 1.
        last: the last line that it touches.
        old: the lines it touches, as they were, in one.
        new: as they are, in one.
        text: the whole module.
    """

    operator: str
    function: str
    line: int
    last: int
    old: str
    new: str
    text: str


def mutants(source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines, each once.

    Raises:
        ValueError: the source is not ASCII, so columns cannot be compared.
    """
    if not source.isascii():
        raise ValueError("columns of ast and parso differ where the source is not ASCII")
    tree = ast.parse(source)
    skipped = list(_skipped(tree))
    functions = list(_functions(tree, ""))
    found: dict[str, Mutant] = {}
    for operator, start, end, text in (*_of_cosmic_ray(source), *_of_ours(source, tree)):
        if text == source or any(a <= start < b for a, b in skipped):
            continue
        try:
            ast.parse(text)
        except SyntaxError:
            continue
        name = max((f for f in functions if f[0] <= start[0] <= f[1]), default=(0, 0, ""))[2]
        old, new = _lines(source, text, start[0], end[0])
        found.setdefault(text, Mutant(operator, name, start[0], end[0], old, new, text))
    return sorted(found.values(), key=lambda mutant: (mutant.line, mutant.operator, mutant.new))


def _of_cosmic_ray(source: str) -> Iterator[tuple[str, Position, Position, str]]:
    nodes = list(ast_nodes(get_ast(source)))
    for name in _OPERATORS:
        operator = get_operator(f"core/{name}")()
        positions = [span for node in nodes for span in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(positions):
            text = MutationVisitor.mutate_code(source, operator, occurrence)
            yield name, start, end, text.replace(*_NEVER)


def _of_ours(source: str, tree: ast.Module) -> Iterator[tuple[str, Position, Position, str]]:
    ends = {f.body[-1] for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}
    for node in ast.walk(tree):
        # At the end of a function this would be a return of None, which comes below.
        if isinstance(node, _STATEMENTS) and not (isinstance(node, ast.Return) and node in ends):
            yield _replaced("DeleteStatement", source, node, "pass")
        if isinstance(node, ast.Return) and node.value is not None:
            yield _replaced("ReturnNone", source, node.value, "None")
        if isinstance(node, ast.Set | ast.Tuple) and all(map(_is_error_number, node.elts)):
            for dropped in node.elts:
                yield _replaced("DropErrorNumber", source, dropped, "-1")


def _is_error_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "errno"


def _replaced(
    name: str, source: str, node: ast.stmt | ast.expr, text: str
) -> tuple[str, Position, Position, str]:
    start, end = _span(node)
    lines = source.splitlines(keepends=True)
    before = "".join(lines[: start[0] - 1]) + lines[start[0] - 1][: start[1]]
    after = lines[end[0] - 1][end[1] :] + "".join(lines[end[0] :])
    return name, start, end, before + text + after


def _span(node: ast.stmt | ast.expr) -> tuple[Position, Position]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _skipped(tree: ast.Module) -> Iterator[tuple[Position, Position]]:
    """What is not worth mutating."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            for inner in ast.walk(statement):
                if isinstance(inner, ast.Constant | ast.BinOp):
                    yield _span(inner)
        if isinstance(statement, ast.Assign) and _is_type(statement.value):
            yield _span(statement)
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            yield _span(statement)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _names(node) & {"__all__", "__slots__", "logger"}:
            yield _span(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dataclass":
            start, end = _span(node)
            yield (start[0], 0), end
        if isinstance(node, ast.arg) and node.annotation:
            yield _span(node.annotation)
        if isinstance(node, ast.FunctionDef) and node.returns:
            yield _span(node.returns)
        if isinstance(node, ast.AnnAssign):
            yield _span(node.annotation)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield _span(node)  # docstrings, and the dots of protocols
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith("logger."):
            yield _span(node)
        if isinstance(node, ast.JoinedStr):
            yield _span(node)


def _is_type(node: ast.expr) -> bool:
    union = isinstance(node, ast.BinOp) and isinstance(node.left, ast.Name)
    return union or isinstance(node, ast.Subscript)


def _names(statement: ast.Assign) -> set[str]:
    return {target.id for target in statement.targets if isinstance(target, ast.Name)}


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[int, int, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            assert child.end_lineno is not None
            if isinstance(child, ast.FunctionDef):
                yield child.lineno, child.end_lineno, name
            yield from _functions(child, f"{name}.")
        else:
            yield from _functions(child, prefix)


def _lines(old: str, new: str, first: int, last: int) -> tuple[str, str]:
    """The changed lines, before and after, each squeezed into one."""
    before, after = old.splitlines(), new.splitlines()
    tail = len(before) - last
    return (
        " ".join(" ".join(before[first - 1 : last]).split()),
        " ".join(" ".join(after[first - 1 : len(after) - tail]).split()),
    )
