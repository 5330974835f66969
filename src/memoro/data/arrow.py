"""Tables of `datasets`: objects in memory, Arrow files, sets of the hub. Images stay encoded in the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memoro.data.columns import Columns, choose
from memoro.data.listing import Listing, Part, Role, Value, role_of
from memoro.data.values import parse
from memoro.errors import DataError, ImageError

if TYPE_CHECKING:
    from memoro.task import HeadKind


@dataclass(frozen=True)
class Cells:
    """Images in a column of a `datasets.Dataset`."""

    table: Any
    column: str
    name: str

    def read(self, row: int) -> bytes:
        return encoded(self.table[row][self.column], self.where(row))

    def where(self, row: int) -> str:
        return f"{self.name}, row {row}"


def encoded(cell: Any, where: str) -> bytes:
    """The bytes of an image cell: bytes, a path, or a record of either."""
    path = cell
    if isinstance(cell, Mapping):
        path = cell.get("path")
        cell = cell.get("bytes")
    if isinstance(cell, bytes):
        return cell
    if not isinstance(path, str):
        raise ImageError(f"{where}: there is no image in it.")
    try:
        if "://" in path:
            from datasets.utils.file_utils import xopen

            with xopen(path, "rb") as remote:
                return bytes(remote.read())
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ImageError(f"{where}: {path}: {error.strerror or error}.") from None


def list_tables(
    tables: Mapping[str, Any],
    *,
    kind: HeadKind | None,
    image_column: str | None,
    label_column: str | Sequence[str] | None,
    name: str,
) -> Listing:
    """What the tables of a set hold, by the names of its splits and the types of its columns."""
    roles, notes = roles_of(tables, name)
    first = next(iter(roles))
    columns = choose(
        tables[roles[first]].features, kind=kind, image_column=image_column, label_column=label_column, name=name
    )
    parts: dict[Role, Part] = {}
    for role, split in roles.items():
        table = tables[split]
        part, note = _part(table, columns, f"{name}:{split}" if len(tables) > 1 else name)
        parts[role] = part
        notes += note
    return Listing(columns.kind, parts, labels=columns.labels, notes=tuple(notes))


def roles_of(tables: Mapping[str, Any], name: str) -> tuple[dict[Role, str], list[str]]:
    """Which table is for what; a set of one table is for training, whatever it is called, unless it says otherwise."""
    roles: dict[Role, str] = {}
    notes = []
    for split in tables:
        role = role_of(split) or ("train" if len(tables) == 1 else None)
        if role is None or role in roles:
            notes.append(f"the split {split!r} was left out: it is none of train, val and test.")
        else:
            roles[role] = split
    if not roles:
        raise DataError(f"{name}: no train, val or test among its splits {', '.join(tables)}; name one with split.")
    return roles, notes


def encoded_table(table: Any, column: str) -> Any:
    """The table's image column alone, not decoded."""
    import datasets

    table = table.select_columns([column])
    if isinstance(table.features[column], datasets.Image):
        table = table.cast_column(column, datasets.Image(decode=False))
    elif getattr(table.features[column], "dtype", None) not in {"binary", "large_binary", "string", "large_string"}:
        raise DataError(
            f"column {column!r} holds {table.features[column]}, not images: cast it with "
            f"dataset.cast_column({column!r}, datasets.Image()), or name another with image_column."
        )
    return table


def _part(table: Any, columns: Columns, name: str) -> tuple[Part, list[str]]:
    missing = [column for column in (columns.image, *columns.values) if column not in table.features]
    if missing:
        raise DataError(f"{name}: no column {missing[0]!r}; it has {', '.join(map(repr, table.features))}.")
    table = table.with_format(None)
    source = Cells(encoded_table(table, columns.image), columns.image, name)
    cells = cells_of(table, columns)
    rows: Sequence[int] = range(len(cells))
    notes = []
    if columns.kind == "softmax":
        # Test sets of competitions come without labels, or with -1 for them.
        rows_known = [row for row, cell in enumerate(cells) if cell is not None]
        if len(rows_known) < len(cells):
            notes.append(f"{name}: {len(cells) - len(rows_known)} images without a label were left out.")
        rows, cells = rows_known, [cells[row] for row in rows_known]
    values: list[Value] = parse(cells, columns.kind, lambda at: f"{name}, row {rows[at]}")
    if columns.kind == "softmax" and columns.labels is not None:
        absent = [label for label in columns.labels if label not in Counter(map(str, values))]
        if absent and values:
            shown = ", ".join(absent[:5])
            notes.append(f"{name}: {len(absent)} of {len(columns.labels)} labels have no image there ({shown}…).")
    return Part(source, rows, values), notes


def cells_of(table: Any, columns: Columns) -> list[Any]:
    """The cells to parse, class numbers replaced by their names, missing ones by None."""
    data = table.select_columns(list(columns.values))[:]
    if len(columns.values) > 1:
        return list(zip(*(data[column] for column in columns.values), strict=True))
    return named(data[columns.values[0]], columns)


def named(cells: Sequence[Any], columns: Columns) -> list[Any]:
    """Class numbers as the names that the table gives them."""
    names = columns.labels
    if names is None or columns.kind == "regression":
        return list(cells)

    def name(number: Any) -> str | None:
        return names[number] if isinstance(number, int) and 0 <= number < len(names) else None

    if columns.kind == "multilabel":
        return [[name(number) for number in (cell if isinstance(cell, Sequence) else [cell])] for cell in cells]
    return [name(cell) for cell in cells]
