"""What makes unit tests impossible to judge, as far as their source shows it.

It is found before anything runs, so that no program can bring it about: what comes up only while tests run makes them
fail. An expression calls the program directly if it calls a name imported from the program, or an attribute of one.
"""

import ast
import re
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
EQUAL = re.compile(r"assert(List|Dict|Set|Tuple|Sequence|Count)?Equal$")
PATCH = re.compile(r"(.*\.)?(patch(\.object|\.dict|\.multiple)?|monkeypatch\.(set|del)(attr|item))$")
ITS_OWN_JUDGE = "both sides are results of the program, so that it judges itself; compare with a value"
NO_IDENTITY = "it asks whether two objects of the program are one; they are in another sandbox, where that is not seen"


def refusal_of(source: str, module: str) -> str:
    r"""Return the first line that cannot be judged, with the reason and the remedy; empty if there is none.

    >>> refusal_of("from solution import f\nassert f(1) == f(2)", "solution")
    'line 2: both sides are results of the program, so that it judges itself; compare with a value'
    >>> refusal_of("from solution import f\nassert f(1) == 2", "solution")
    ''
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # reported when the tests are loaded
        return ""
    found = min(Reader(tree, module).refusals(), default=None)
    return f"line {found[0]}: {found[1]}" if found else ""


class Reader:
    """One file of tests, and the names that it imports from the program."""

    def __init__(self, tree: ast.Module, module: str) -> None:
        self.tree = tree
        self.module = module
        self.imported: set[str] = set()
        self.defined: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == module:
                self.imported |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                self.imported |= {alias.asname or alias.name for alias in node.names if alias.name == module}
            elif isinstance(node, Function | ast.ClassDef):
                self.defined.add(node.name)
        self.held = set(self.imported)  # and what is assigned from the program
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and self.is_of_program(node.value, self.held):
                self.held |= {ast.unparse(target) for target in node.targets}

    def is_of_program(self, node: ast.AST, names: set[str]) -> bool:
        """Return whether the expression is one of these names, an attribute or item of one, or a call of such."""
        while isinstance(node, ast.Attribute | ast.Call | ast.Await | ast.Subscript):
            if ast.unparse(node) in names:
                return True
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and node.id in names

    def calls(self, node: ast.AST) -> bool:
        """Return whether the expression is a call of the program."""
        node = node.value if isinstance(node, ast.Await) else node
        return isinstance(node, ast.Call) and self.is_of_program(node, self.imported)

    def refusals(self) -> Iterator[tuple[int, str]]:
        """Yield lines and reasons, in any order."""
        for node in ast.walk(self.tree):
            if reason := self.reason_of(node):
                yield getattr(node, "lineno", 0), reason

    def reason_of(self, node: ast.AST) -> str:
        match node:
            case ast.ImportFrom(module=self.module, names=[ast.alias(name="*")]):
                return "it takes all names of the program, which could replace `abs` and others; import them one by one"
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]) if self.calls(left) and self.calls(right):
                return ITS_OWN_JUDGE
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[right]) if self.hold(left, right):
                return NO_IDENTITY
            case ast.Call(func=ast.Attribute(attr=name), args=[left, right, *_]) if name.startswith("assert"):
                if EQUAL.match(name) and self.calls(left) and self.calls(right):
                    return ITS_OWN_JUDGE
                return NO_IDENTITY if name in ("assertIs", "assertIsNot") and self.hold(left, right) else ""
            case ast.Call(func=function, args=[target, *_]) if PATCH.match(ast.unparse(function)):
                is_named = isinstance(target, ast.Constant) and isinstance(target.value, str)
                if is_named or self.is_of_program(target, self.held):
                    return "it patches what the program uses, which is in another sandbox; pass that as an argument"
            case ast.Call(args=args, keywords=keywords) if self.calls(node):
                if any(self.is_own(value) for value in [*args, *[keyword.value for keyword in keywords]]):
                    return "it hands the program a function or class of the test, which is no plain data; pass values"
            case ast.ClassDef(bases=bases) if any(self.is_of_program(base, self.imported) for base in bases):
                return "it derives a class from one of the program, which is in another sandbox"
            case ast.Attribute(attr="xfail" | "expectedFailure") | ast.Name(id="expectedFailure"):
                return "a test is expected to fail; what passes it cannot be told from what does not"
            case ast.Assert(test=ast.Tuple(elts=[_, *_])):
                return "it asserts a tuple, which is always true; leave out the parentheses"
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name.startswith("test"):
                return self.reason_of_test(node)
            case _:
                return ""
        return ""

    def hold(self, *nodes: ast.AST) -> bool:
        return all(self.is_of_program(node, self.held) for node in nodes)

    def is_own(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Lambda) or (isinstance(node, ast.Name) and node.id in self.defined)

    def reason_of_test(self, test: Function) -> str:
        """Return why a test decides nothing."""
        if any("fixture" in ast.unparse(decorator) for decorator in test.decorator_list):
            return ""
        for node in own_nodes(test):
            if isinstance(node, ast.Yield | ast.YieldFrom):
                return f"{test.name} is a generator, which nothing runs"
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Compare | ast.BoolOp):
                return f"{test.name} returns what it found, which nothing reads; use assert"
        return ""


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions and classes in it."""
    pending: list[ast.AST] = [*function.body]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            pending += ast.iter_child_nodes(node)
