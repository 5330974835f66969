"""The command that finds images that look alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from memoro.cli.options import BackboneOption, DeviceOption, Json, name_backbone, print_json, share_cores
from memoro.console import format_count, make_table, plain_console

app = typer.Typer()


@app.command()
def similar(
    images: Annotated[
        list[str],
        typer.Argument(
            help="Images to look for, then where to look: folder, .zip, table, hub id, or a file that --index wrote.",
        ),
    ],
    top: Annotated[int, typer.Option("--top", min=1, help="Number of images to find for each image.")] = 10,
    find_duplicates: Annotated[
        bool, typer.Option("--duplicates", help="List groups of copies and near-duplicates instead.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Picture to write, a row for each image: .png, .jpg or .webp."),
    ] = None,
    index: Annotated[
        Path | None, typer.Option("--index", help="File to write the index to (.safetensors), for later searches.")
    ] = None,
    backbone: BackboneOption = None,
    image_size: Annotated[int | None, typer.Option(min=16, help="Pixels of an image's edge.")] = None,
    device: DeviceOption = None,
    as_json: Json = False,
) -> None:
    """memoro similar photo.jpg photos/ -o sheet.png
    memoro similar photo.jpg photos/ --index photos.safetensors
    memoro similar photos/ --duplicates

    Find images that look alike.

    The backbone's statistics of each image are kept on disk and projected to a vector of at most 1 kB. Similarity is
    the cosine of two vectors. An image is not compared with itself. See docs/similar.md.
    """
    share_cores()
    *queries, place = images
    if bool(queries) == find_duplicates:
        raise typer.BadParameter("give images and a folder to look in, or one folder with --duplicates.")
    from memoro.backbones.load import own_device
    from memoro.evaluation.overlays import draw_matches, picture_format, save_picture
    from memoro.images import find_images
    from memoro.similar import SUFFIX, duplicates, open_index

    if out is not None:
        picture_format(out)  # an error before the work
    errors = plain_console(stderr=True, soft_wrap=True)
    name = name_backbone(backbone)
    rows: list[tuple[str, Sequence[tuple[str, float | None]]]] = []
    if find_duplicates:
        rows = [(group[0], [(other, None) for other in group[1:]]) for group in duplicates(place)]
        errors.print(f"{format_count(len(rows), 'group')} of images that look the same")
    else:
        files = [str(path) for path in find_images(queries)]
        made = place.endswith(SUFFIX)
        more: dict[str, Any] = {} if made else {"image_size": image_size, "quiet": False}
        found = open_index(place, backbone if made else name, device=str(own_device(device)), **more)
        for skipped in found.skipped:
            errors.print(f"skipped {skipped.where}: {skipped.reason}")
        if index is not None:
            found.save(index)
            errors.print(f"index of {format_count(len(found.names), 'image')}: {index}")
        for file, matches in zip(files, found.search(files, top + 1), strict=True):
            own = os.path.realpath(file)
            rows.append((file, [match for match in matches if os.path.realpath(match.image) != own][:top]))
    if out is not None and rows:
        save_picture(draw_matches([(image, matches[:top]) for image, matches in rows]), out)
        errors.print(f"written to {out}")
    if as_json and find_duplicates:
        print_json([[image, *(other for other, _ in matches)] for image, matches in rows])
    elif as_json:
        print_json({image: [{"image": one, "similarity": score} for one, score in matches] for image, matches in rows})
    elif rows:
        lines = [
            [image, one, *([] if score is None else [f"{score:.3f}"])]
            for image, matches in rows
            for one, score in matches
        ]
        columns = ["image", "looks like", *([] if find_duplicates else ["similarity"])]
        plain_console().print(make_table(columns, lines, left=2))
