"""The command line answers at once: reading commands never load torch, hivemind, transformers or pydantic."""

import subprocess
import sys

HEAVY = ("torch", "hivemind", "transformers", "pydantic", "numpy")


def test_reading_commands_load_nothing_heavy(tmp_path) -> None:
    script = (
        "import sys\n"
        "from p2prl.cli.main import main\n"
        "home, *heavy = sys.argv[1:]\n"
        "sys.argv[1:] = ['--home', home, 'status']\n"
        "try:\n    code = main()\nexcept SystemExit as end:\n    code = end.code\n"
        "print(code, [name for name in heavy if name in sys.modules])"
    )
    command = [sys.executable, "-c", script, str(tmp_path), *HEAVY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "3 []", done.stderr


def test_the_daemon_side_of_hivemind_stays_out_of_the_simulated_transport() -> None:
    script = "import sys, p2prl.swarm.memory_transport; print('hivemind' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False False"


def test_a_simulated_swarm_needs_neither_torch_nor_hivemind_nor_a_loop_of_its_own() -> None:
    script = (
        "import sys, p2prl.simulate.swarm\n"
        "print([name for name in ('torch', 'transformers', 'hivemind', 'async_solipsism') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
