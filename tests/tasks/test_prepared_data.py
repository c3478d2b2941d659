from tasks import prepared_data


def test_what_prepare_did_not_make_is_moved_out_of_its_way(project, tiny, capsys):
    folder = project / "data" / "tiny"
    made = {path.name for path in (folder / "prepared").iterdir()}
    assert prepared_data.set_foreign_aside("tiny") == []
    for content in ("first", "second"):
        (folder / "prepared" / "my_labels.npy").write_text(content)
        (folder / "prepared" / "notes").mkdir()
        (folder / "prepared" / "notes" / "a.md").write_text(content)
        moved = prepared_data.set_foreign_aside("tiny")
        assert [path.parent for path in moved] == [folder / "set_aside"] * 2
    assert {path.name for path in (folder / "prepared").iterdir()} == made
    aside = {path.name for path in (folder / "set_aside").iterdir()}
    assert aside == {"my_labels.npy", "my_labels.npy.2", "notes", "notes.2"}
    assert (folder / "set_aside" / "notes" / "a.md").read_text() == "first"
    assert "it now lies at data/tiny/set_aside/notes.2" in capsys.readouterr().err


def test_without_a_manifest_only_what_dvc_knows_is_made(project, tiny):
    folder = project / "data" / "tiny"
    arrays = {path.name for path in (folder / "prepared").glob("*.npy")}
    (folder / "prepared" / "manifest.json").write_text("{")
    (folder / "dvc.lock").touch()
    assert prepared_data.set_foreign_aside("tiny") == []
    (folder / "dvc.lock").unlink()
    assert {path.name for path in prepared_data.set_foreign_aside("tiny")} == arrays | {"manifest.json"}
