from pathlib import Path

from p2prl.environments import catalogue


def test_every_data_set_of_reasoning_gym_is_there() -> None:
    names = catalogue.names()
    assert sum(name.startswith("reasoning_gym:") for name in names) == 106
    assert names[0] == "builtin:addition"
    assert len(set(names)) == len(names)


def test_data_files_of_the_first_folder_come_first(tmp_path: Path) -> None:
    for folder, name in (("a", "x.jsonl"), ("b", "x.jsonl"), ("b", "y.parquet"), ("b", "notes.txt")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).touch()
    saved = tmp_path / "b" / "saved"
    saved.mkdir()
    (saved / "dataset_info.json").touch()
    found = catalogue.data_files([tmp_path / "a", tmp_path / "b", tmp_path / "absent"])
    assert found == [tmp_path / "a" / "x.jsonl", saved, tmp_path / "b" / "y.parquet"]


def test_a_packages_name_is_one_source_however_it_is_spelt() -> None:
    assert {catalogue.source_of(name) for name in ("My_Tasks", "my.tasks", "my--tasks")} == {"my-tasks"}


def test_plug_ins_are_listed_without_being_loaded(install) -> None:
    install("my-tasks", {"broken": "no_such_module:Nothing"}, "unused", "")
    entry = next(entry for entry in catalogue.entries() if entry.name == "my-tasks:broken")
    assert (entry.version, entry.about) == ("my-tasks==1.5", "a plug-in")
    assert "my-tasks" in catalogue.plugin_sources()
