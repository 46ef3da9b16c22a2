"""A home as a node leaves it: a recipe, a chain of versions in the store, some of their states."""

from pathlib import Path

from p2prl import codec
from p2prl.buffer.store import Store
from p2prl.models.builtin import WEIGHTS
from p2prl.models.state import Payload, open_state, state_hash, write_payloads
from p2prl.paths import Home
from p2prl.recipe import find
from p2prl.records import Manifest, Version
from p2prl.weights import delta
from p2prl.weights.contents import content_of, name_of_file
from p2prl.weights.partial import content_path
from tests import factories

RECIPE, TEXT = find("addition")
BASE = Version(0, 0, state_hash(WEIGHTS))


def make_home(root: Path) -> Home:
    home = Home.locate(root).of(RECIPE.swarm_id)
    home.create()
    (home.state / "last-recipe.toml").write_text(TEXT)
    return home


def write_version(path: Path, step: int) -> bytes:
    """Version 0's weights with some bits changed, one more a step; its hash."""
    with open_state(WEIGHTS) as (places, data):
        payloads = []
        for place in places:
            content = bytearray(data[place.begin : place.end])
            for number in range(step):
                content[4 * number] ^= 1
            payloads.append(Payload(place.name, place.shape, lambda content=content: memoryview(content)))
        return write_payloads(path, payloads)


def add_versions(home: Home, num: int, held: tuple[int, ...], *, deltas: bool = False) -> list[Manifest]:
    """A chain of `num` versions; the states of `held` lie in the home.

    Each is an anchor, or a delta that lies in the home too.
    """
    chain: list[Manifest] = []
    parent_id = codec.ZERO_HASH
    store = Store.open(home.database, factories.NOW, RECIPE.swarm_id)
    for step in range(1, num + 1):
        staged = home.states / "new"
        version = Version(1, step, write_version(staged, step))
        kind, base = ("delta", chain[-1].version if chain else BASE) if deltas else ("anchor", None)
        path = make_delta(home, staged, step) if deltas else staged
        made = factories.manifest(
            step,
            version=version,
            parent=chain[-1].version if chain else BASE,
            parent_id=parent_id,
            contents=(content_of(path, kind, base),),
        )
        data = codec.seal(made, factories.identity(0), RECIPE.swarm_id)
        parent_id = codec.sealed_id(data)
        store.save_manifest(parent_id, data, 1, step)
        chain.append(made)
        if step in held:
            path = content_path(home.states, version.hash)
            path.parent.mkdir(exist_ok=True)
            staged.rename(path)
    store.save_head(parent_id)
    (home.states / "new").unlink(missing_ok=True)
    store.close()
    return chain


def make_delta(home: Home, child: Path, step: int) -> Path:
    parent, out = home.states / "before", home.blobs / "new"
    write_version(parent, step - 1)
    delta.encode(parent, child, out)
    parent.unlink()
    path = content_path(home.blobs, name_of_file(out))
    path.parent.mkdir(exist_ok=True)
    out.rename(path)
    return path


def other_swarm(home: Home) -> None:
    """The home's recipe is another than the one its store is of."""
    text = TEXT.replace("group_size = 8", "group_size = 4")
    assert text != TEXT
    (home.state / "last-recipe.toml").write_text(text)
