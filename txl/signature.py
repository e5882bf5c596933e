"""The signature is the schema: plain values held against the parameters of what they are for. The standard library only."""

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, Union

DIRECTIVES = {"_target_", "_partial_"}
LITERAL_KEYS = ("prompt", "stop", "stops")  # of generate.py: any text is a value there, `???` too
FILLED_IN = "cache_dir"  # a parameter of every corpus that the program gives


def problems(node: Any, path: str, locate: Callable[[Any], Any]) -> Iterator[str]:
    """What is wrong with a tree of plain values, a line for each key: unknown, missing, of the wrong type, out of bounds.

    A group with a `_target_` is held against the signature of what `locate` finds under that name; groups of settings,
    which are dataclasses, say themselves which values are out of bounds.
    """
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from problems(item, f"{path}[{index}]", locate)
    if not isinstance(node, Mapping):
        return
    at = f"{path}." if path else ""
    target = None
    if "_target_" in node:
        try:
            target = locate(node["_target_"])
        except ImportError as error:
            package = node["_target_"].partition(".")[0]
            yield f"{at}_target_: {node['_target_']} cannot be had ({type(error).__name__}); is {package} installed?"
        except Exception as error:
            yield f"{at}_target_: {node['_target_']} cannot be had ({type(error).__name__})"
    found = list(call_problems(target, node, at)) if target is not None else []
    yield from found
    for key, value in node.items():
        yield from problems(value, f"{at}{key}", locate)
    if is_dataclass(target) and not found:
        try:
            target(**arguments(node))
        except ValueError as error:
            yield f"{at}{error}"


def arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    """What a group gives to its `_target_`."""
    return {key: value for key, value in node.items() if key not in DIRECTIVES}


def call_problems(target: Any, node: Mapping[str, Any], at: str) -> Iterator[str]:
    """What is wrong with calling the target with the node's values, each line beginning with the key."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        yield f"{at}_target_: {node['_target_']} cannot be called"
        return
    hints = _hints(target)
    for key, value in arguments(node).items():
        if key not in parameters:
            near = difflib.get_close_matches(str(key), parameters, n=1)
            yield f"{at}{key}: {target.__name__} takes no {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        elif node.get("_partial_") and parameters[key].default is inspect.Parameter.empty:
            yield f"{at}{key}: is filled in by the program; leave it out"
        elif value == "???" and key not in LITERAL_KEYS:
            yield f"{at}{key}: a value must be given"
        elif key in hints and not fits(value, hints[key]):
            yield f"{at}{key}: must be {describe(hints[key])}, got {value!r}"
    if not node.get("_partial_"):
        for name, parameter in parameters.items():
            needed = parameter.default is parameter.empty and parameter.kind is parameter.KEYWORD_ONLY
            if needed and name not in node and name != FILLED_IN:
                yield f"{at}{name}: missing"


def _hints(target: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # a library's annotation that Python cannot resolve is no ground to refuse a value
        return {}


def _is_list(hint: Any) -> bool:
    kind = typing.get_origin(hint) or hint
    return inspect.isclass(kind) and issubclass(kind, Sequence) and kind is not str


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain value can stand for an annotation; a group with a `_target_` stands for any object."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, typing.TypeVar) or (isinstance(value, Mapping) and "_target_" in value):
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in options)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in options)
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint in (bool, int, str):
        return type(value) is hint
    if dict in (hint, origin):
        return isinstance(value, Mapping)
    if not _is_list(hint) or not isinstance(value, (list, tuple)):
        return False
    items = [option for option in options if option is not ...]
    if origin is tuple and ... not in options and items:
        return len(items) == len(value) and all(map(fits, value, items))
    return not items or all(fits(item, items[0]) for item in value)


def describe(hint: Any) -> str:
    """An annotation in the words of a configuration."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        both = {int, float} <= set(options)  # a number is a number
        return " or ".join(dict.fromkeys(describe(option) for option in options if not (both and option is int)))
    if origin is Literal:
        return " or ".join(map(repr, options))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    if _is_list(hint):
        inner = [option for option in options if option is not ...]
        length = f"a list of {len(inner)}" if origin is tuple and ... not in options else "a list"
        return f"{length}, each {describe(inner[0])}" if inner else "a list"
    return words.get(hint) or "a group of keys, chosen as group=option"
