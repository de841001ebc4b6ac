"""``cachecraft store``: look into the tiers that outlive a process, check them, and make room in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cachecraft_rag.cli import output
from cachecraft_rag.cli.output import moment, plain, size
from cachecraft_rag.cli.store_tiers import Tier, check_errors, fail, opened, surveyed
from cachecraft_rag.store.entry_check import EntryCheck
from cachecraft_rag.store.entry_info import EntryInfo
from cachecraft_rag.store_config import ByteSize

app = typer.Typer(
    help="Look into the chunk store on disk or in Redis, check it, and make room in it.\n\n"
    "stats, ls and verify change nothing and can run beside the engines that use the store.",
    no_args_is_help=True,
)

Disk = Annotated[Path | None, typer.Option("--disk", metavar="PATH", help="Folder of the disk tier.")]
Remote = Annotated[str | None, typer.Option("--remote", metavar="URL", help="Redis or Valkey: redis://host:port/db")]
Namespace = Annotated[str | None, typer.Option("--namespace", metavar="NAME", help="Only the chunks of this tenant.")]
MasterKey = Annotated[
    str | None, typer.Option("--master-key", metavar="SOURCE", help="Path of the key file, or env:NAME.")
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON.")]


@app.command()
def stats(disk: Disk = None, remote: Remote = None, namespace: Namespace = None, as_json: Json = False) -> None:
    """Show how many entries each tier holds, and their bytes, by namespace."""
    rows: list[dict[str, Any]] = []
    with surveyed(disk, remote) as tiers:
        for tier in tiers:
            entries = _entries(tier, namespace)
            names = sorted({info.key.namespace for info in entries})
            parts = [{"namespace": name, **_sums(entries, name)} for name in names]
            rows.append({"tier": tier.name, **_sums(entries), "namespaces": parts})
    if as_json:
        output.show_json({"tiers": rows})
        return
    table = output.new_table("tier", "namespace", "entries", "size", numbers=("entries", "size"), texts=("namespace",))
    for row in rows:
        for part in row["namespaces"]:
            table.add_row(row["tier"], plain(part["namespace"]), f"{part['entries']:,}", size(part["bytes"]))
        table.add_row(row["tier"], "all", f"{row['entries']:,}", size(row["bytes"]), style="bold")
    output.show(table)


@app.command("ls")
def list_entries(
    disk: Disk = None,
    remote: Remote = None,
    namespace: Namespace = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Most entries to show; 0 shows all.")] = 50,
    as_json: Json = False,
) -> None:
    """List entries, the most recently used first."""
    with surveyed(disk, remote) as tiers:
        entries = [info for tier in tiers for info in _entries(tier, namespace)]
    entries.sort(key=lambda info: info.used_at, reverse=True)
    shown = entries[: limit or None]
    if as_json:
        output.show_json({"entries": [_as_dict(info) for info in shown], "total": len(entries)})
        return
    names = ("namespace", "chunk", "context", "tokens", "size", "last used", "static")
    several = len(tiers) > 1  # one tier alone need not be named: 80 columns are few
    table = output.new_table(*["tier"] * several, *names, numbers=("tokens", "size"), texts=("namespace",))
    for info in shown:
        tokens = "" if info.tokens is None else f"{info.tokens:,}"
        ids = (plain(info.key.namespace), plain(info.key.chunk[:8]), plain(info.key.context[:8]))
        used, static = moment(info.used_at), "yes" if info.static else ""
        table.add_row(*[info.tier] * several, *ids, tokens, size(info.nbytes), used, static)
    output.show(table)
    if len(shown) < len(entries):
        typer.echo(f"{len(shown):,} of {output.entries(len(entries))}; --limit 0 shows all")


@app.command()
def verify(
    disk: Disk = None,
    remote: Remote = None,
    namespace: Namespace = None,
    master_key: MasterKey = None,
    remove: Annotated[bool, typer.Option("--remove", help="Delete the damaged entries.")] = False,
    as_json: Json = False,
) -> None:
    """Read every entry in full and report those that are damaged.

    The exit code is 1 when an entry is damaged or can't be read.

    An encrypted store needs its --master-key; an entry of another key looks damaged.

    Nothing is deleted without --remove, and no encrypted entry without a key that opens others.
    """
    checks: list[EntryCheck] = []
    num_removed = 0
    with surveyed(disk, remote, master_key) as tiers:
        for tier in tiers:
            found = list(_checks(tier, namespace))
            checks += found
            if remove:
                num_removed += _remove(tier, found, master_key)
    bad = [check for check in checks if check.state != "intact"]
    if as_json:
        output.show_json(
            {
                "checked": len(checks),
                "intact": len(checks) - len(bad),
                "removed": num_removed,
                "entries": [{**_as_dict(check.info), "state": check.state, "reason": check.reason} for check in bad],
            }
        )
    else:
        _show_checks(checks, bad, num_removed)
    if bad:
        raise typer.Exit(1)


@app.command()
def evict(
    to: Annotated[str, typer.Option("--to", metavar="SIZE", help="What each tier may still hold: 2GiB, 500MB, 0.")],
    disk: Disk = None,
    remote: Remote = None,
) -> None:
    """Delete the least recently used entries of each tier until it holds at most so many bytes."""
    try:
        nbytes = TypeAdapter(ByteSize).validate_python(to)
    except ValidationError as error:
        raise typer.BadParameter(error.errors()[0]["msg"], param_hint="--to") from error
    with surveyed(disk, remote) as tiers:
        for tier in tiers:
            before = _sums(_entries(tier))["bytes"]
            with opened(tier) as store:
                num_gone = store.shrink(nbytes)
            after = _sums(_entries(tier))["bytes"]
            typer.echo(f"{tier.name}: evicted {output.entries(num_gone)}; {size(before)} before, {size(after)} now")


@app.command()
def clear(
    disk: Disk = None,
    remote: Remote = None,
    namespace: Namespace = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Delete all entries, or those of one namespace."""
    with surveyed(disk, remote) as tiers:
        for tier in tiers:
            entries = _entries(tier, namespace)
            of_whom = "" if namespace is None else f" of namespace {plain(namespace)}"
            what = f"{tier.name}: {output.entries(len(entries))}{of_whom}, {size(_sums(entries)['bytes'])}"
            if entries and not yes:
                typer.confirm(f"{what}. Delete?", abort=True)
            with opened(tier) as store:
                num_gone = store.clear(namespace)
            typer.echo(f"{tier.name}: deleted {output.entries(num_gone)}{of_whom}")


def _entries(tier: Tier, namespace: str | None = None) -> list[EntryInfo]:
    entries = tier.entries(namespace)
    check_errors(tier)
    return entries


def _sums(entries: list[EntryInfo], namespace: str | None = None) -> dict[str, int]:
    sizes = [info.nbytes for info in entries if namespace in (None, info.key.namespace)]
    return {"entries": len(sizes), "bytes": sum(sizes)}


def _as_dict(info: EntryInfo) -> dict[str, Any]:
    return {
        "tier": info.tier,
        "namespace": info.key.namespace,
        "chunk": info.key.chunk,
        "context": info.key.context,
        "tokens": info.tokens,
        "bytes": info.nbytes,
        "used_at": info.used_at,
        "static": info.static,
    }


def _checks(tier: Tier, namespace: str | None) -> Iterator[EntryCheck]:
    """Check a tier, with a bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"reading {tier.name}", total=len(_entries(tier, namespace)))
        for check in tier.verify(namespace):
            progress.advance(task)
            yield check
    check_errors(tier)


def _remove(tier: Tier, checks: list[EntryCheck], master_key: str | None) -> int:
    damaged = [check.info.key for check in checks if check.state == "damaged"]
    if not damaged:
        return 0
    if master_key is not None and not any(check.state == "intact" for check in checks):
        fail(
            f"none of the {output.entries(len(checks))} of the {tier.name} tier opens with this master key, so it is "
            "probably the wrong one: nothing was deleted. `cachecraft store clear` deletes without looking."
        )
    with opened(tier) as store:
        return sum(store.remove(key) for key in damaged)


def _show_checks(checks: list[EntryCheck], bad: list[EntryCheck], num_removed: int) -> None:
    if bad:
        names = ("tier", "namespace", "chunk", "context", "state", "reason")
        table = output.new_table(*names, texts=("namespace", "reason"))
        for check in bad:
            key = check.info.key
            ids = (plain(key.namespace), plain(key.chunk[:8]), plain(key.context[:8]))
            table.add_row(check.info.tier, *ids, check.state, plain(check.reason))
        output.show(table)
    states = [check.state for check in checks]
    parts = [f"{states.count(state):,} {state}" for state in ("intact", "damaged", "unreadable")]
    typer.echo(f"{output.entries(len(checks))}: {', '.join(parts)}; {num_removed:,} removed")
