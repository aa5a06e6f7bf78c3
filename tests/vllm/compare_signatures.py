"""Holds the stub of vLLM against the installed package; run by the interpreter of the engine's environment.

Writes each difference on a line: a class, a function, a parameter, a default or a field that the stub has and the
package has not, or has otherwise.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

STUB = Path(__file__).parents[1] / "support" / "vllm_stub"
# What tests script the stub with.
OWN = {"last"}


def modules() -> list[str]:
    """Names of all modules of the stub."""
    files = sorted(STUB.rglob("*.py"))
    return [".".join(file.relative_to(STUB).with_suffix("").parts).removesuffix(".__init__") for file in files]


def parameters(function: Any) -> dict[str, tuple[str, str]]:
    """Kind and default of each parameter, by name."""
    found = inspect.signature(function).parameters.values()
    return {one.name: (one.kind.name, repr(one.default)) for one in found if one.name not in {"self", "cls"}}


def describe(module: ModuleType) -> dict[str, Any]:
    """Public classes and functions of a module that are its own, as values that can be compared."""
    described: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value):
            described[name] = {"methods": {}, "fields": sorted(fields(value))}
            for method, function in inspect.getmembers(
                value, lambda one: inspect.isfunction(one) or inspect.ismethod(one)
            ):
                if not method.startswith("_") and method not in OWN:
                    described[name]["methods"][method] = parameters(function)
        elif inspect.isfunction(value):
            described[name] = parameters(value)
    return described


def fields(value: type) -> set[str]:
    """Fields of a data class, whatever makes it one."""
    if dataclasses.is_dataclass(value):
        return {field.name for field in dataclasses.fields(value)}
    return set(getattr(value, "__struct_fields__", ()))


def differences(stub: dict[str, Any], real: dict[str, Any]) -> list[str]:
    """What the stub has that the package has not, or has otherwise."""
    found: list[str] = []
    for module, names in stub.items():
        for name, expected in names.items():
            present = real[module].get(name)
            where = f"{module}.{name}"
            if present is None:
                found.append(f"{where} is not there")
            elif "methods" in expected:
                found += [f"{where}.{field} is no field" for field in set(expected["fields"]) - set(present["fields"])]
                for method, wanted in expected["methods"].items():
                    given = present["methods"].get(method)
                    if given is None:
                        found.append(f"{where}.{method} is not there")
                    else:
                        found += compare(f"{where}.{method}", wanted, given)
            else:
                found += compare(where, expected, present)
    return found


def compare(where: str, wanted: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """Parameters of the stub that the package has not, or has otherwise; and those that it cannot do without."""
    found = [
        f"{where}({name}) is {given.get(name)} and not {expected}"
        for name, expected in wanted.items()
        if tuple(given.get(name, ())) != tuple(expected)
    ]
    empty = repr(inspect.Parameter.empty)
    return found + [
        f"{where}({name}) is needed too"
        for name, (kind, default) in given.items()
        if name not in wanted and default == empty and not kind.startswith("VAR")
    ]


def main() -> None:
    """Describes the stub in this process when asked to, else the package, and compares."""
    if sys.argv[1:] == ["--stub"]:
        sys.path.insert(0, str(STUB))
        print(json.dumps({name: describe(importlib.import_module(name)) for name in modules()}))
        return
    stub = json.loads(Path(sys.argv[1]).read_text())
    real = {name: describe(importlib.import_module(name)) for name in stub}
    Path(sys.argv[2]).write_text("".join(f"{line}\n" for line in differences(stub, real)))


if __name__ == "__main__":
    main()
