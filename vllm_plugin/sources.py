"""Where the probes of `compat.py` look: the vLLM of this process, or anything else that can answer the same questions.

Knows nothing of vLLM itself.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Installed", "Sources", "assigned_attributes", "class_in", "resolve", "syntax_digest"]


def resolve(path: str) -> Any:
    """Imports "module:name"."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Sources(Protocol):
    """Answers about one version of a package. `path` is "module:Class"; what is not there raises."""

    def has(self, path: str) -> bool:
        """Whether the module (or the name in it) exists."""

    def parameters(self, path: str, method: str) -> set[str]:
        """Names of a method's parameters."""

    def assigned(self, path: str) -> set[str]:
        """Attributes that the class's `__init__` gives to `self`: they exist only on instances."""

    def members(self, path: str) -> set[str]:
        """Fields, properties and methods, inherited ones included."""

    def method_text(self, path: str, method: str) -> str:
        """A method's source."""

    def module_text(self, module: str) -> str:
        """A module's source, without importing it."""


class Installed:
    """What this process imports (`Sources`)."""

    def has(self, path: str) -> bool:
        if ":" in path:
            return resolve(path) is not None
        return importlib.import_module(path) is not None

    def parameters(self, path: str, method: str) -> set[str]:
        return set(inspect.signature(getattr(resolve(path), method)).parameters)

    def assigned(self, path: str) -> set[str]:
        return assigned_attributes(ast.parse(self.method_text(path, "__init__")))

    def members(self, path: str) -> set[str]:
        cls = resolve(path)
        declared = {name for base in inspect.getmro(cls) for name in inspect.get_annotations(base)}
        return set(dir(cls)) | declared

    def method_text(self, path: str, method: str) -> str:
        return textwrap.dedent(inspect.getsource(getattr(resolve(path), method)))

    def module_text(self, module: str) -> str:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(module)
        return Path(spec.origin).read_text()


def assigned_attributes(tree: ast.AST) -> set[str]:
    """Names x of all assignments to `self.x` under `tree`."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def class_in(text: str, name: str) -> ast.ClassDef:
    """The definition of class `name` in a module's source. Raises: LookupError."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise LookupError(name)


def syntax_digest(sources: Sources, modules: Iterable[str]) -> str:
    """SHA-256 of what modules do: comments and layout do not count."""
    trees = [ast.dump(ast.parse(sources.module_text(module))) for module in modules]
    return hashlib.sha256("".join(trees).encode()).hexdigest()
