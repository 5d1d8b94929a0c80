"""The commands and their options."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import anabranch
from anabranch.cli.failure import Failure

app = typer.Typer(
    name="anabranch",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


def show_version(asked: bool) -> None:
    """Prints the version and ends, if asked."""
    if asked:
        typer.echo(f"anabranch {anabranch.__version__}")
        raise typer.Exit


def fail(error: Exception, code: int = 1) -> typer.Exit:
    """Prints an error as one line on stderr; to be raised."""
    with suppress(OSError):  # the terminal may be gone
        typer.echo(f"anabranch: {' '.join(str(error).split())}", err=True)
    return typer.Exit(code)


# Typer's own check of a path would fail in a box: readable=False leaves it to the command, which fails in one line.


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Mixture-of-experts operations for PyTorch."""


@app.command()
def demo(
    text: Annotated[
        Path | None,
        typer.Option(
            help="A file or folder to train on; the Python standard library if left out.", readable=False
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the checkpoint and the report; a new run replaces one in it.", readable=False
        ),
    ] = Path("runs/demo"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, if it was interrupted.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of steps, instead of as many as fit into --seconds.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="Aimed at for everything, from reading to report.")
    ] = 120.0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**31 - 1, help="Of parameters and batches.")] = None,
) -> None:
    """Train a small byte-level MoE transformer and report on it."""
    from anabranch.cli.demo.command import Options, run_demo
    from anabranch.cli.demo.stop import Interrupted, exit_code

    options = Options(text, out, resume, steps, seconds, device, threads, seed)
    try:
        run_demo(options, Console())
    except Failure as error:
        raise fail(error) from None
    except Interrupted as error:
        raise fail(error, error.code) from None
    except KeyboardInterrupt as error:
        raise fail(Failure("interrupted"), exit_code(*error.args) if error.args else INTERRUPTED) from None


@app.command()
def doctor() -> None:
    """Say what is installed, which backends are usable, and why the others are not."""
    from anabranch.cli.doctor import show_doctor

    show_doctor(Console())


@app.command()
def bench(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="cpu, qwen, sonic, mixtral, or T,H,I,E,K as numbers; more than once for several."),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Also the first shape with these numbers of tokens, with commas.")
    ] = None,
    skew: Annotated[
        str | None,
        typer.Option(
            help="Also the first shape with these exponents of Zipf's law, with commas; 0 is random."
        ),
    ] = None,
    backends: Annotated[
        str | None, typer.Option(help="Also moe_mlp with each of these backends, with commas.")
    ] = None,
    peers: Annotated[
        str | None, typer.Option(help="none, all, or names with commas; what fits the device if left out.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also a step of ours, kernel by kernel. Needs a GPU.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=1, help="Aimed at for everything; what no time is left for is skipped.")
    ] = 240.0,
    rounds: Annotated[int, typer.Option(min=3, help="How many times each variant is timed, at most.")] = 30,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="CPU threads.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder of bench.json and bench.png.", readable=False)] = Path(
        "runs/bench"
    ),
) -> None:
    """Time moe_mlp beside its peers, as a share of what this machine could do."""
    from anabranch.cli.bench.command import Options, run_bench

    options = Options(
        device, shape or (), tokens, skew, backends, peers, explain, seconds, rounds, threads, out
    )
    try:
        run_bench(options, Console())
    except Failure as error:
        raise fail(error) from None
    except KeyboardInterrupt:
        raise fail(Failure("interrupted; bench.json has what was finished"), INTERRUPTED) from None


@app.command()
def tune(
    op: Annotated[str, typer.Option(help="moe_mlp, or grouped_gemm with the routing fused in.")] = "moe_mlp",
    shape: Annotated[str, typer.Option(help="qwen, sonic, mixtral, or T,H,I,E,K as numbers.")] = "qwen",
    tokens: Annotated[
        str | None, typer.Option(help="Numbers of tokens, with commas, instead of the shape's.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    device: Annotated[str | None, typer.Option(help="A CUDA device.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A table to add the results to, as the package ships them.", readable=False),
    ] = None,
) -> None:
    """Search for the fastest tiles on this GPU, check each one's numbers, and store what is found."""
    from anabranch.cli.tune import Options, run_tune

    try:
        run_tune(Options(op, shape, tokens, dtype, device, out), Console())
    except Failure as error:
        raise fail(error) from None
    except KeyboardInterrupt:
        raise fail(Failure("interrupted; what was found is stored"), INTERRUPTED) from None
