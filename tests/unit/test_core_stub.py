"""The hand-written stub of the core against the module itself."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvist
from kvist import _core

# Of the stub alone: a type that the module asks for and does not have.
PROTOCOLS = {"Engine"}
STUB = ast.parse((Path(kvist.__file__).parent / "_core.pyi").read_text())


def pairs() -> Iterator[tuple[str, ast.FunctionDef, object]]:
    """Every function and method of the stub with its counterpart."""
    for node in STUB.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node, getattr(_core, node.name)
        elif isinstance(node, ast.ClassDef) and node.name not in {"CoreError", *PROTOCOLS}:
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    owner = getattr(_core, node.name)
                    found = owner if member.name == "__new__" else inspect.getattr_static(owner, member.name)
                    yield f"{node.name}.{member.name}", member, found


def parameters_of_stub(node: ast.FunctionDef) -> list[tuple[str, bool, bool]]:
    """(name, is keyword-only, has a default) of each parameter, without self and cls."""
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = len(node.args.defaults)
    found = [(arg.arg, False, position >= len(positional) - defaults) for position, arg in enumerate(positional)]
    found += [
        (arg.arg, True, default is not None)
        for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    ]
    return [entry for entry in found if entry[0] not in {"self", "cls"}]


@pytest.mark.parametrize(
    ("name", "node", "found"), list(pairs()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_signature_is_as_the_stub_says(name: str, node: ast.FunctionDef, found: object) -> None:
    if any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list):
        assert inspect.isgetsetdescriptor(found)
        return
    actual = [
        (parameter.name, parameter.kind is parameter.KEYWORD_ONLY, parameter.default is not parameter.empty)
        for parameter in inspect.signature(found).parameters.values()
        if parameter.name != "self"
    ]
    assert parameters_of_stub(node) == actual


def test_the_stub_names_all_that_the_module_has_and_no_more() -> None:
    named = {node.name for node in STUB.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))} - PROTOCOLS
    assert named == {name for name in vars(_core) if not name.startswith("_")}
    for node in STUB.body:
        if isinstance(node, ast.ClassDef) and node.name not in {"CoreError", *PROTOCOLS}:
            methods = {member.name for member in node.body if isinstance(member, ast.FunctionDef)} - {"__new__"}
            assert methods == {name for name in vars(getattr(_core, node.name)) if not name.startswith("_")}, node.name


def test_everything_public_is_described() -> None:
    for name, node, _ in pairs():
        if not name.endswith("__new__"):
            assert ast.get_docstring(node), name
