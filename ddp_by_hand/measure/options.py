"""Command lines from frozen dataclasses: a field is an option.

    @dataclass(frozen=True)
    class Options:
        rounds: int = option(3, "times that each variant is built", metavar="N", check=positive)
        rows: tuple[str, ...] | None = option(None, "batch x tokens (default: the model's)")
        compile: bool = option(False, "compile each layer (default: off)")

    @program("experiments.name", Options)
    def main(options: Options) -> int: ...  # returns the exit status

The annotation is the type: `int`, `float`, `str` or `Path`, perhaps `| None`; `bool` is a flag, and
a tuple takes several values. A default that the help text does not tell is put behind it. What
is wrong is one line that names the option, and exit status 2.
"""

import functools
import inspect
import math
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, field, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ddp_by_hand.lm.programs import program_name
from ddp_by_hand.measure.command_line import (
    BadInput,
    Parser,
    check_file,
    ending_quietly,
    refuse,
)
from ddp_by_hand.measure.extras import require

Options = TypeVar("Options")
_OPTION = "option"  # key of a field's metadata


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    group: str | None = None,
    check: Callable[[Any], None] | None = None,
    unique: bool = False,
    aliases: tuple[str, ...] = (),
    **of_argparse: Any,
) -> Any:
    """Returns a dataclass field that is a command-line option.

    Args:
        default: without one it is a positional argument.
        group: begins a group of options of that title, which those that follow belong to.
        check: see `requires`; of several values each is checked, None is not.
        unique: repeated values count once.
        aliases: other flags for the same option.
        of_argparse: `metavar`, `choices` or `type`, see `argparse`.
    """
    specification = {
        "help": help, "group": group, "check": check, "unique": unique, "aliases": aliases,
        "argparse": of_argparse,
    }  # fmt: skip
    return field(default=default, metadata={_OPTION: specification})


def requires(is_right: Callable[[Any], bool], message: str) -> Callable[[Any], None]:
    """Returns a check; its message follows the option's name, with `{}` for the value."""

    def check(value: Any) -> None:
        if not is_right(value):
            raise ValueError(message.format(value))

    return check


positive = requires(lambda value: 0 < value < math.inf, "{}: give a positive number")
not_negative = requires(lambda value: 0 <= value < math.inf, "{}: give 0 or more")
is_writable = functools.partial(check_file, "")  # of a file's path; the name is put before it
is_seed = requires(lambda value: 0 <= value < 1 << 64, "{}: give 0 to 2**64 - 1")  # torch's range


def flag(name: str) -> str:
    """Returns a field's option name: `seq_length` becomes `--seq-length`."""
    return f"--{name.replace('_', '-')}"


def parser_of(kind: type, **texts: Any) -> Parser:
    """Returns the parser of a dataclass; `texts` are `Parser`'s arguments."""
    parser = Parser(**texts)
    group, hints = parser, get_type_hints(kind)
    for one in _options(kind):
        specification = one.metadata[_OPTION]
        if specification["group"]:
            group = parser.add_argument_group(specification["group"])
        is_positional = one.default is MISSING
        name = one.name if is_positional else flag(one.name)
        group.add_argument(name, *specification["aliases"], **_argument(one, hints[one.name]))
    return parser


def parse_options(
    kind: type[Options],
    arguments: Sequence[str] | None = None,
    *,
    needs: Sequence[str] = (),
    **texts: Any,
) -> Options:
    """Parses `arguments` (default: the command line's) into a dataclass of options.

    A mistake ends it with one line and status 2, also a ValueError that the dataclass
    raises in `__post_init__`.

    Args:
        needs: packages without which the program cannot run. `--help` needs none of them.
        texts: see `Parser`.

    Raises:
        MissingExtra: a package of `needs` is not installed.
    """
    parser = parser_of(kind, **texts)
    found = vars(parser.parse_args(arguments))
    try:
        options = kind(**{one.name: _checked(one, found[one.name]) for one in _options(kind)})
    except ValueError as error:
        parser.error(str(error))
    require(*needs)
    return options


def program(
    name: str, kind: type[Options], *, needs: Sequence[str] = (),
    read: Callable[[Sequence[str]], Sequence[str]] | None = None, **texts: Any,
) -> Callable[[Callable[[Options], int]], Callable[..., int]]:  # fmt: skip
    """Decorates `main(options)` of a program, which then takes arguments, as `parse_options` does.

    BadInput ends it with one line and status 2; see `ending_quietly` for its other ends. What
    `--help` says first is the docstring of its module.

    Args:
        name: the module's, by which it is started.
        read: makes the arguments that are parsed of those that are given.
        needs, texts: as for `parse_options`.
    """

    def decorate(main: Callable[[Options], int]) -> Callable[..., int]:
        @functools.wraps(main)
        @ending_quietly
        def run(arguments: Sequence[str] | None = None) -> int:
            texts.setdefault("description", inspect.unwrap(main).__globals__["__doc__"])
            called = program_name(name)
            try:
                if read is not None:
                    arguments = read(sys.argv[1:] if arguments is None else arguments)
                options = parse_options(kind, arguments, needs=needs, prog=called, **texts)
                return main(options)
            except BadInput as error:
                return refuse(called, error)

        return run

    return decorate


def as_arguments(options: Any) -> list[str]:
    """Returns arguments from which `parse_options` makes equal options."""
    words = []
    for one in _options(type(options)):
        value = getattr(options, one.name)
        if value == one.default:
            continue
        words += [] if one.default is MISSING else [flag(one.name)]
        if value is not True:
            words += map(str, value) if isinstance(value, tuple) else [str(value)]
    return words


def shared_values(options: Any, kind: type[Options], **others: Any) -> Options:
    """Builds a dataclass from the fields that `options` has under the same names, and `others`."""
    names = {one.name for one in fields(kind)} - others.keys()
    return kind(**{n: getattr(options, n) for n in names if hasattr(options, n)}, **others)


def _options(kind: type) -> Iterable[Field]:
    return (one for one in fields(kind) if _OPTION in one.metadata)


def _argument(one: Field, hint: Any) -> dict[str, Any]:
    """Returns the keyword arguments of `add_argument` for a field."""
    specification = one.metadata[_OPTION]
    found = {"help": specification["help"], **specification["argparse"]}
    if one.default is not MISSING:
        found["default"] = one.default
        is_told = "(default: " in found["help"] or found["help"] == SUPPRESS
        if not (is_told or one.default is None or one.default is False):
            found["help"] += f" (default: {_text(one.default)})"
    if hint is bool:
        return {**found, "action": "store_true"}
    (kind,) = {*(get_args(hint) if isinstance(hint, UnionType) else [hint])} - {NoneType}
    if get_origin(kind) is tuple:
        kind, *others = get_args(kind)
        found["nargs"] = "+" if others == [...] else 1 + len(others)
    return {"type": kind, **found}


def _text(default: Any) -> str:
    if type(default) is tuple:  # and no subclass, which has a text of its own
        return " ".join(map(_text, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def _checked(one: Field, value: Any) -> Any:
    """Checks a parsed value; turns lists into tuples."""
    specification = one.metadata[_OPTION]
    if isinstance(value, list):
        value = tuple(dict.fromkeys(value) if specification["unique"] else value)
    check = specification["check"]
    if check is None or value is None:
        return value
    for single in value if isinstance(value, tuple) else [value]:
        try:
            check(single)
        except ValueError as error:
            raise ValueError(f"{flag(one.name)} {error}") from None
    return value
