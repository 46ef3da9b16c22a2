"""`p2prl weights`: which versions lie on this disk, whether they are whole, what is no longer needed.

In: the node's home, its daemon running or not. Out: tables or JSON. `gc` and what `verify` sets aside are for a home
without daemon: a running one collects by itself and finds what is corrupt when it uses it. What other recipes trained in
this home is told of and verified, and dropped by nobody but its owner.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2prl.cli.client import NodeFile, is_running
from p2prl.cli.reading import home_of, json_option, print_json, reading, wants_json
from p2prl.cli.render import size
from p2prl.errors import ConfigError, HomeLocked, StoreError
from p2prl.paths import Home

if TYPE_CHECKING:
    from p2prl.cli.versions import Versions
    from p2prl.weights.holdings import Awaited, Holding, Holdings
    from p2prl.weights.store import WeightStore

CORRUPT = ".corrupt"  # what a file that was set aside ends in
FOUND_CORRUPT = 1  # exit code


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def weights(ctx: click.Context, as_json: bool) -> None:
    """Versions on this disk: list (the default), verify, gc."""
    if ctx.invoked_subcommand is None:
        _list(ctx, as_json)


@weights.command("list")
@reading
def list_(ctx: click.Context, as_json: bool) -> None:
    """Which versions are here, what of each, and why it is kept."""
    _list(ctx, as_json)


def _list(ctx: click.Context, as_json: bool) -> None:
    versions = _versions(ctx)
    found, elsewhere = _holdings(versions, _store(versions.home)), _elsewhere(versions.home)
    here = [each for each in found.versions if each.kept]
    if wants_json(ctx, as_json):
        print_json(
            {
                "schema": 1,
                "head": str(versions.head),
                "awaited": _awaited_row(found.awaited) if found.awaited else None,
                "versions": [_row(each) for each in here],
                "ahead": {"files": found.ahead.num_files, "bytes": found.ahead.num_bytes},
                "others": {"files": found.others.num_files, "bytes": found.others.num_bytes},
                "other_recipes": {"folders": len(elsewhere), "bytes": sum(elsewhere.values())},
                "bytes": found.num_bytes,
            }
        )
        return
    newest = f"newest version {versions.head}" if versions.line else "no version yet but the base model"
    click.echo(f"{newest} of {versions.recipe.name}; {_count(len(here), 'version')} here, {size(found.num_bytes)}")
    if found.awaited and found.awaited.total.num_files:
        click.echo(_awaited_text(found.awaited))
    for each in here:
        state = f"state {size(each.state_bytes)}" if each.state_bytes else ""
        deltas = [f"delta from {part.base_step} {size(part.num_bytes)}" for part in each.parts if _is_file(part)]
        click.echo(
            f"{each.version.step:>8}  {each.version!s:<20} {', '.join(filter(None, [state, *deltas]))}: {each.kept}"
        )
    click.echo(f"{0:>8}  {versions.base!s:<20} the base model, in {versions.home.models}")
    if found.ahead.num_files:
        files, num_bytes = _count(found.ahead.num_files, "file"), size(found.ahead.num_bytes)
        click.echo(f"{files} of versions that this node does not follow yet, {num_bytes}")
    if found.others.num_files:
        files, num_bytes = _count(found.others.num_files, "file"), size(found.others.num_bytes)
        click.echo(f"{files} of no version known here, {num_bytes}; to drop them: p2prl weights gc")
    for folder, num_bytes in elsewhere.items():
        click.echo(f"{size(num_bytes)} of other recipes in {folder}, or of older releases; remove what you don't need")


@weights.command()
@reading
def verify(ctx: click.Context, as_json: bool) -> None:
    """Read all of it and compare with the hashes. Corrupt files are set aside, unless the daemon runs.

    Exit code 1 when something is corrupt.
    """
    from p2prl.weights.store import wrong_content, wrong_state

    home = home_of(ctx)
    runs, files, total = daemon_runs(home), [], 0
    for store in map(_store, _homes(home)):
        held = store.held
        files += [(store.state_path(name), name, wrong_state) for name in sorted(held.states)]
        files += [(store.content_path(name), name, wrong_content) for name in sorted(held.contents)]
        total += sum(held.states.values()) + sum(held.contents.values())
    faults = []
    for path, name, judge in files:
        why = judge(path, name)
        if why and path.exists():  # a running daemon may have dropped it meanwhile
            faults.append({"path": str(path), "why": why, "set_aside": "" if runs else str(_set_aside(path))})
    if wants_json(ctx, as_json):
        print_json({"schema": 1, "files": len(files), "bytes": total, "corrupt": faults})
    else:
        for fault in faults:
            where = f"; now {Path(fault['set_aside']).name}" if fault["set_aside"] else "; the daemon runs: left there"
            click.echo(f"corrupt: {fault['path']}: {fault['why']}{where}")
        click.echo(
            f"{_count(len(files), 'file')}, {size(total)}: " + (f"{len(faults)} corrupt" if faults else "all whole")
        )
    if faults:
        ctx.exit(FOUND_CORRUPT)


@weights.command()
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--unread", is_flag=True, help="Also what versions need that only another release of p2prl can read.")
@reading
def gc(ctx: click.Context, dry_run: bool, unread: bool, as_json: bool) -> None:
    """Drop what neither this node nor those behind it need of its recipe: old versions, what was set aside."""
    versions = _versions(ctx)
    home = versions.home
    with _alone(home):
        if not home.database.is_file():
            raise StoreError(f"{home.database} is gone, so nobody knows what is needed; start the node first")
        if not unread and (num := versions.num_unread()):
            raise StoreError(
                f"{_count(num, 'version')} of this recipe can't be read by this p2prl, so nobody knows what is needed: "
                "run the release that made them, or give them up with --unread"
            )
        store = _store(home)
        garbage = _holdings(versions, store).garbage
        held = store.held
        named = {content.content_hash for manifest in versions.beside() for content in manifest.contents}
        num_files = len(garbage.states) + len(garbage.contents) + len(garbage.parts)
        freed = sum(held.states[name] for name in garbage.states)
        freed += sum(held.contents[name] for name in garbage.contents)
        freed += sum(held.parts[name] for name in garbage.parts)
        left = [path for folder in (home.states, home.blobs) for path in folder.glob(f"*/*{CORRUPT}")]
        freed += sum(path.stat().st_size for path in left)
        if not dry_run:
            store.sweep()
            store.collect(garbage)
            store.drop_parts(named - garbage.parts)
            for path in left:
                path.unlink(missing_ok=True)
    num_files += len(left)
    if wants_json(ctx, as_json):
        print_json({"schema": 1, "dry_run": dry_run, "files": num_files, "bytes": freed})
    else:
        verb = "would be" if dry_run else "was" if num_files == 1 else "were"
        click.echo(f"{_count(num_files, 'file')}, {size(freed)}, {verb} dropped")


# -- the home -------------------------------------------------------------------------------------------------------


def _versions(ctx: click.Context) -> "Versions":
    from p2prl.cli.versions import read_versions

    return read_versions(home_of(ctx))


def _store(home: Home) -> "WeightStore":
    from p2prl.weights.store import WeightStore

    store = WeightStore(home.states, home.blobs)
    store.look()
    return store


def _homes(home: Home) -> list[Home]:
    """This one for each swarm whose weights are here, and, the first, for what no release sorted by swarm."""
    above = home.of(b"")
    names = {path.name for folder in (above.states, above.blobs) for path in folder.glob("?" * 16)}
    return [above, *(replace(above, swarm=name) for name in sorted(names))]


def _elsewhere(home: Home) -> dict[Path, int]:
    """Bytes of other recipes' weights, by folder."""
    found: dict[Path, int] = {}
    for other in _homes(home):
        held = _store(other).held
        for folder, table in ((other.states, held.states), (other.blobs, held.contents)):
            if table and other.swarm != home.swarm:
                found[folder] = sum(table.values())
    return found


def _holdings(versions: "Versions", store: "WeightStore") -> "Holdings":
    from p2prl import config
    from p2prl.weights.chain import Needs
    from p2prl.weights.holdings import holdings

    settings, _ = config.load(versions.home.config_file, os.environ)
    needs = Needs(versions.recipe.learner.max_age, settings.storage.cache)
    return holdings(tuple(reversed(versions.line)), store.held, needs, versions.base, versions.beside())


def daemon_runs(home: Home) -> bool:
    import msgspec

    try:
        return is_running(msgspec.json.decode(home.node_file.read_bytes(), type=NodeFile).pid)
    except FileNotFoundError:
        return False
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"can't read {home.node_file}: {error}. Is it another user's?") from None


@contextmanager
def _alone(home: Home) -> Iterator[None]:
    """Nobody else uses the home meanwhile."""
    from filelock import FileLock, Timeout

    lock = FileLock(home.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise HomeLocked(
            f"a p2prl daemon runs for {home.state}: it drops what it does not need by itself. "
            f"To do it now, stop it first: {home.command} stop"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _set_aside(path: Path) -> Path:
    aside = path.with_name(path.name + CORRUPT)
    path.rename(aside)
    return aside


# -- words ----------------------------------------------------------------------------------------------------------


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _awaited_text(awaited: "Awaited") -> str:
    """What it is waiting for, and what of that is here."""
    total, whole = awaited.total, awaited.whole
    lines = [
        f"on the way to {awaited.version}: {whole.num_files} of {_count(total.num_files, 'file')} here, "
        f"{size(awaited.here_bytes)} of {size(total.num_bytes)}"
    ]
    for part, of_bytes in zip(awaited.parts, awaited.part_totals, strict=True):
        name = part.kind if part.base_step is None else f"{part.kind} from {part.base_step}"
        lines.append(f"          {name}: {size(part.num_bytes)} of {size(of_bytes)} here, not fetched twice")
    return "\n".join(lines)


def _awaited_row(awaited: "Awaited") -> dict[str, object]:
    return {
        "version": str(awaited.version),
        "files": awaited.total.num_files,
        "files_here": awaited.whole.num_files,
        "bytes": awaited.total.num_bytes,
        "bytes_here": awaited.here_bytes,
    }


def _is_file(part) -> bool:
    return part.is_held and part.kind != "anchor"


def _row(each: "Holding") -> dict[str, object]:
    contents = [
        {"kind": part.kind, "base_step": part.base_step, "bytes": part.num_bytes, "held": part.is_held}
        for part in each.parts
    ]
    return {
        "step": each.version.step,
        "version": str(each.version),
        "state_hash": each.version.hash.hex(),
        "state_bytes": each.state_bytes,
        "contents": contents,
        "kept": each.kept,
    }
