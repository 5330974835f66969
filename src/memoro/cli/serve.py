"""The command that answers over HTTP."""

from __future__ import annotations

import webbrowser
from functools import partial
from typing import Annotated, Any

import typer

from memoro.cli.options import DeviceOption, PrecisionOption, TaskBackboneOption, load, share_cores
from memoro.cli.settings import Settings, add_flags, read_settings, shell_log
from memoro.console import format_count, plain_console, quiet_libraries
from memoro.serve.options import ServeOptions

app = typer.Typer()


@app.command()
@add_flags(
    "serve",
    port={"min": 0, "max": 65535},
    token={"envvar": "MEMORO_TOKEN"},
    read_token={"envvar": "MEMORO_READ_TOKEN"},
    allow_host={"default": None, "show_default": False},
)
def serve(
    context: typer.Context,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            "-t",
            help="Folder of task files, where attached tasks are stored; or a task file or hub id (owner/name), repeat "
            "for more: attaching is then off. The name of a new folder must end with /.",
        ),
    ] = None,
    backbone: TaskBackboneOption = None,
    device: DeviceOption = None,
    precision: PrecisionOption = "auto",
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    settings: Settings = None,
    **flags: Any,
) -> None:
    """memoro serve --tasks tasks/

    Serve tasks over HTTP; attach and detach them without a restart. For example, with the tasks pets and rooms:

    curl --data-binary @photo.jpg 'http://127.0.0.1:8000/v1/predict?tasks=pets'

    curl -T rooms.safetensors http://127.0.0.1:8000/v1/tasks/rooms

    The page at / shows the answers to an image that you drop on it, and lists the tasks. The API is described at /docs
    and in docs/serving.md. In Python: memoro.Client("http://127.0.0.1:8000").predict("photo.jpg").

    Limits of requests and connections are settings: --set max_images=16.
    """
    share_cores()
    from memoro.errors import need

    need("fastapi", "uvicorn", "python_multipart", "prometheus_client", extra="serve")
    from memoro.serve.server import run_server
    from memoro.serve.store import open_store

    limits = read_settings("serve", settings)[ServeOptions]
    options = ServeOptions(allowed_hosts=tuple(flags.pop("allow_host") or ()), **flags, **limits)
    quiet_libraries()
    console = plain_console(stderr=True, soft_wrap=True)
    store = open_store(tasks or [], partial(load, backbone, device, precision=precision))
    model = store.current.model
    console.print(f"{format_count(len(model.names), 'task')} on {model.backbone.name}: {', '.join(model.names) or '-'}")
    for name, reason in store.skipped.items():
        shell_log(console, context)(f"not served: {name}: {reason}")
    if not store.writable:
        console.print("attaching is off: it needs --tasks FOLDER")
    elif not options.may_write:
        console.print("attaching is off: it needs --token, or a server on loopback without --allow-host")
    elif not model.names:
        console.print(
            f"the folder {(tasks or ['-'])[0]} has no tasks yet: attach some on the page, or put files into it first"
        )

    def started(url: str) -> None:
        console.print(f"listening on {url} (open it in a browser; API: {url}/docs); Ctrl-C stops")
        if browse:
            webbrowser.open(url)

    run_server(store, options, started)
    console.print("stopped")
