"""Types that are read from the source are those that Python would have made of it."""

import ast
import typing
from dataclasses import fields, is_dataclass

import pytest

from kd import settings
from kd.run import keys
from kd.run.annotations import foreign, members, names_in, shown, takes_class, type_of

GROUPS = [kind for kind in vars(settings).values() if isinstance(kind, type) and is_dataclass(kind)]


def read(text: str) -> object:
    return type_of(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize("group", GROUPS, ids=lambda kind: kind.__name__)
def test_what_the_source_says_of_a_setting_is_its_type(group: type) -> None:
    hints = typing.get_type_hints(group, include_extras=True)
    declared = {
        ast.unparse(node.target): node.annotation
        for base in group.__mro__
        for node in getattr(keys.definition(base.__name__), "body", ())
        if isinstance(node, ast.AnnAssign)
    }
    for field in fields(group):
        assert type_of(declared[field.name]) == hints[field.name], field.name


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("Optional[Union[str, int]]", "str | int | None"),
        ("typing.Union[int, str, None]", "int | str | None"),
        ("'float | None'", "float | None"),
        ("Annotated[float, Range('> 0')] | Literal['auto', 3]", "float > 0 | Literal['auto', 3]"),
        ("dict[str, list[torch.Tensor]]", "dict[str, list[torch.Tensor]]"),
        ("tuple[float, ...]", "tuple[float, ...]"),
        ("str | Class", "str | Class"),
    ],
)
def test_a_type_as_text(text: str, same: str) -> None:
    assert shown(read(text)) == same


def test_an_unknown_type_is_its_name() -> None:
    kind = read("Iterable[Logger] | None")
    assert members(kind) == (foreign("Iterable[Logger]"), type(None))
    assert [*names_in(kind)] == ["Iterable[Logger]"]


def test_a_setting_that_takes_a_class() -> None:
    assert takes_class(read("dict[str, Class] | None"))
    assert not takes_class(read("Any"))
