"""Measures calibration on fresh images: with folds, with a validation split, and by leave-one-out answers.

    python scripts/measure_calibration.py dtd10.zip cifar100.zip:0-25 cifar100.zip:25-50 --out results/calibration.md

`:0-25` takes a range of a zip's classes, so that one set makes several. Expected calibration errors on the test split,
before and after calibration. Results of earlier calls are kept, and only what is missing is trained.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import memoro
from memoro.training import Cache
from reports import load_results, make_parser, table, write_report

WAYS: dict[str, dict[str, Any]] = {
    "joint, folds": {"folds": 4},
    "joint, validation split": {"folds": 0, "val_fraction": 0.15},
    "read-out, leave-one-out": {"regime": "readout"},
}


def unpack(source: str, work: Path, most: int) -> Path:
    """A folder of the chosen classes of a zip, with at most so many training images, the first of each class."""
    name, _, chosen = source.partition(":")
    folder = work / f"{Path(name).stem}-{chosen or 'all'}-{most}"
    if folder.is_dir():
        return folder
    with zipfile.ZipFile(name) as archive:
        files = [path for path in archive.namelist() if not path.endswith("/")]
        labels = sorted({path.split("/")[-2] for path in files})
        start, _, end = chosen.partition("-")
        labels = labels[int(start) : int(end)] if chosen else labels
        kept: dict[tuple[str, str], int] = {}
        for path in sorted(files):
            split, label = path.split("/")[-3:-1]
            kept[split, label] = kept.get((split, label), 0) + 1
            if label in labels and (split == "test" or kept[split, label] <= most // len(labels)):
                target = folder / split / label / path.split("/")[-1]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(path))
    return folder


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backbone", default="memoro-tiny")
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--most", type=int, default=1000, help="training images of a set, at most")
    parser.add_argument("--work", type=Path, default=Path("calibration-work"), help="folder for images and features")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backbone = memoro.load_backbone(options.backbone)
    results = load_results(options.out)
    own = results.setdefault(Path(options.backbone).name, {})
    for source in options.data:
        data = unpack(source, options.work, options.most)
        found = own.setdefault(Path(source).name.replace(".zip", ""), {})
        for way, settings in WAYS.items():
            if way in found:
                continue
            cache = Cache(options.work / "features")
            common: dict[str, Any] = {"image_size": options.image_size, "cache": cache, "quiet": True, "workers": 0}
            metrics = memoro.train(data, backbone=backbone, task="task", **common, **settings).metrics
            found["test images"] = metrics["images"]
            after = metrics["calibration_error"]
            found[way] = [metrics["accuracy"], metrics.get("calibration_error_before", after), after]
            print(source, way, found[way], flush=True)
        write_report(options.out, results, report(results, options.most, options.image_size))


def report(results: dict[str, Any], most: int, size: int) -> list[str]:
    """The lines of the report."""
    lines = [
        "# Calibration on fresh images",
        "",
        "Made by `scripts/measure_calibration.py`. Expected calibration error over 15 bins on the test split, before "
        f"→ after calibration; {size} px, at most {most} training images of a set. `cifar100:0-25`: its first 25 "
        "classes.",
    ]
    for backbone, sets in results.items():
        rows = []
        for name, found in sets.items():
            cells = ("–" if way not in found else f"{found[way][1]:.3f} → {found[way][2]:.3f}" for way in WAYS)
            rows.append([name, found["test images"], *cells])
        means = (
            f"{mean(found[way][1] for found in sets.values() if way in found):.3f} → "
            f"{mean(found[way][2] for found in sets.values() if way in found):.3f}"
            for way in WAYS
        )
        rows.append(["**mean**", "", *means])
        lines += ["", f"## {backbone}", "", *table(["set", "test images", *WAYS], rows)]
    return lines


if __name__ == "__main__":
    main()
