"""The command that answers over HTTP."""

from __future__ import annotations

import webbrowser
from functools import partial
from typing import Annotated

import typer

from memoro.cli.options import DeviceOption, TaskBackboneOption, load, share_cores
from memoro.console import format_count, plain_console, quiet_libraries

app = typer.Typer()


@app.command()
def serve(
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            "-t",
            help="Folder of task files, where attached tasks are stored; or a task file or hub id (owner/name), repeat "
            "for more: attaching is then off. The name of a new folder must end with /.",
            show_default=False,
        ),
    ] = None,
    backbone: TaskBackboneOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8000,
    device: DeviceOption = None,
    max_batch: Annotated[int, typer.Option(help="Maximum number of images per pass of the backbone.")] = 16,
    max_delay_ms: Annotated[float, typer.Option(help="Maximum time an image waits for others.")] = 5.0,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="MEMORO_TOKEN",
            help="Bearer token for attaching and detaching. Without it, both work on loopback only, without a proxy.",
        ),
    ] = None,
    read_token: Annotated[
        str | None,
        typer.Option(
            envvar="MEMORO_READ_TOKEN",
            help="Bearer token for all other requests except health checks; without --token, also for attaching.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name that requests may use, if a proxy is in front of a server on loopback; repeat for more."
        ),
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Maximum number of images waiting; more are refused with 503.")] = 256,
    max_images: Annotated[int, typer.Option(help="Maximum number of images per request.")] = 64,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Maximum size of a request in MB.")] = 32,
    max_megapixels: Annotated[int, typer.Option(min=1, help="Maximum size of an image in megapixels.")] = 50,
    max_connections: Annotated[
        int,
        typer.Option(
            help="Maximum number of connections, at most half of the files that the process may open (ulimit -n)."
        ),
    ] = 1024,
    timeout: Annotated[
        float, typer.Option(help="Maximum seconds per request, and again for reading the answer.")
    ] = 30.0,
    header_timeout: Annotated[
        float, typer.Option(help="Maximum seconds until the headers of a request are complete.")
    ] = 10.0,
    idle_timeout: Annotated[
        float, typer.Option(help="Seconds after which a connection without requests is closed.")
    ] = 60.0,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve tasks over HTTP; attach and detach them without a restart.

    memoro serve --tasks tasks/

    curl --data-binary @photo.jpg 'http://127.0.0.1:8000/v1/predict?tasks=pets'

    curl -T pets.safetensors http://127.0.0.1:8000/v1/tasks/pets

    The page at / shows the answers to an image that you drop on it, and lists
    the tasks. The API is described at /docs and in docs/serving.md. In Python:
    memoro.Client("http://127.0.0.1:8000").predict("photo.jpg").
    """
    share_cores()
    from memoro.extras import need

    need("fastapi", "uvicorn", "python_multipart", "prometheus_client", extra="serve")
    from memoro.serve.options import ServeOptions
    from memoro.serve.server import open_store, run_server

    options = ServeOptions(
        host=host,
        port=port,
        token=token,
        read_token=read_token,
        allowed_hosts=tuple(allow_host or ()),
        max_batch=max_batch,
        max_delay_ms=max_delay_ms,
        max_queue=max_queue,
        max_images=max_images,
        max_body=max_body_mb * 10**6,
        max_pixels=max_megapixels * 1_000_000,
        max_connections=max_connections,
        timeout=timeout,
        header_timeout=header_timeout,
        idle_timeout=idle_timeout,
    )
    quiet_libraries()
    console = plain_console(stderr=True, soft_wrap=True)
    store = open_store(tasks or [], partial(load, backbone, device))
    model = store.current.model
    console.print(f"{format_count(len(model.names), 'task')} on {model.backbone.name}: {', '.join(model.names) or '-'}")
    for name, reason in store.skipped.items():
        console.print(f"not served: {name}: {reason}")
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
