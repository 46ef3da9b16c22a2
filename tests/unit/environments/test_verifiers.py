"""Against the real package, where it is installed: it brings some forty others, so a checkout's set-up leaves it out."""

import sys
from pathlib import Path

import pytest

from p2prl.environments.judge import RanTooLong
from p2prl.environments.registry import HELD_OUT_FROM, Conversing, Replaying
from p2prl.environments.rewarder import LimitGuard, Limits
from p2prl.environments.verifiers import TasksetEnvironment, load_taskset
from p2prl.errors import ConfigError
from tests.conftest import check_needs

TASKSET = """
import verifiers.v1 as vf

class DoublesData(vf.TaskData):
    right: str = ""

class DoublesTask(vf.Task[DoublesData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.right)

    @vf.reward(weight=1.0)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 5)
{extra}

class DoublesConfig(vf.TasksetConfig):
    num_tasks: int = 20

class DoublesTaskset(vf.Taskset[DoublesTask, DoublesConfig]):
    def load(self):
        return [DoublesTask(DoublesData(prompt={prompt}, system_prompt="Compute.", right=str(2 * i)), self.config.task)
                for i in range(self.config.num_tasks)]

__all__ = ["DoublesTaskset"]
"""
NEEDS_A_RUNTIME = """
    @vf.reward
    async def ran(self, trace: vf.Trace, runtime) -> float:
        return 1.0
"""
PREPARES = """
    async def setup(self, trace, runtime) -> None:
        return None
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check_needs("verifiers")
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(extra: str = "", prompt: str = 'f"Twice {i}?"') -> None:
        monkeypatch.delitem(sys.modules, "p2prl_doubles", raising=False)
        (tmp_path / "p2prl_doubles.py").write_text(TASKSET.replace("{extra}", extra).replace("{prompt}", prompt))

    return write


def test_tasks_of_one_turn_are_prompts_with_the_tasks_own_rewards(made) -> None:
    made()
    environment = load_taskset("p2prl_doubles", {"num_tasks": 30})
    assert environment.version.startswith("verifiers==")
    assert environment.num_prompts == 27
    assert environment.prompt(3) == "Compute.\n\nTwice 3?"
    assert environment.prompt(HELD_OUT_FROM) == "Compute.\n\nTwice 27?"
    assert environment.reward(3, "6") == (1.0, "correct 1, short 1")
    assert environment.reward(3, "7") == (0.5, "correct 0, short 1")
    assert environment.reward(3, "seven of them") == (0.0, "correct 0, short 0")


@pytest.mark.parametrize(
    ("extra", "prompt", "params", "message"),
    [
        ("", "None", {}, "no user who speaks"),
        (NEEDS_A_RUNTIME, "str(i)", {}, "has rewards that need a runtime"),
        (PREPARES, "str(i)", {}, "prepares or clears up a runtime"),
        ("", "str(i)", {"num_task": 3}, "no parameter 'num_task'; did you mean 'num_tasks'"),
        ("", "str(i)", {"num_tasks": "many"}, "can't be made from"),
        ("", "str(i)", {"num_tasks": 0}, "has no tasks"),
        ("    1 / 0", "str(i)", {}, "can't be loaded"),
    ],
)
def test_what_needs_more_than_a_turn_is_a_sentence(made, extra: str, prompt: str, params: dict, message: str) -> None:
    made(extra, prompt)
    with pytest.raises(ConfigError, match=message):
        load_taskset("p2prl_doubles", params)


# -- several turns --------------------------------------------------------------------------------------------------

ROBOT = """
import verifiers.v1 as vf

class RobotState(vf.State):
    steps: int = 0

class Legs(vf.Toolset[vf.ToolsetConfig, RobotState]):
    TOOL_PREFIX = {prefix}

    async def setup_task(self, data):
        self.wall = data.wall

    @vf.tool
    async def step(self, far: int) -> str:
        \"\"\"Go that far.\"\"\"
        if far == 13:
            raise ValueError("unlucky")
        self.state.steps += far
        return "wall" if self.state.steps >= self.wall else f"at {self.state.steps}"

class RobotData(vf.TaskData):
    wall: int = 3

class RobotTask(vf.Task[RobotData, RobotState]):
    @classmethod
    def toolsets(cls, config):
        return [Legs(vf.ToolsetConfig({config}))]

    @vf.stop
    async def fell(self, trace: vf.Trace) -> bool:
        return trace.state.steps > 100

    @vf.reward
    async def near(self, trace: vf.Trace) -> float:
        return max(0.0, 1.0 - abs(trace.state.steps - self.data.wall) / 10)

    @vf.reward(weight=0.0)
    async def used(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))
{extra}

class RobotTaskset(vf.Taskset[RobotTask, vf.TasksetConfig]):
    def load(self):
        return [RobotTask(RobotData(prompt=f"Find wall {i}.", system_prompt="You have legs.", wall=i)) for i in range(20)]

__all__ = ["RobotTaskset"]
"""
GUESSING = """
import asyncio
import verifiers.v1 as vf

class GuessData(vf.TaskData):
    number: int = 0

class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.number))

class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        return [GuessTask(GuessData(prompt={prompt}, number=i)) for i in range(20)]

class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns={max_turns})
    word: str = "try"
{seats}

class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as player, asyncio.TaskGroup() as group:
            reply = await group.create_task(player.turn({opening}))
            while not reply.terminated and reply.last_reply != str(task.data.number):
                hint = "higher" if int(reply.last_reply) < task.data.number else "lower"
                reply = await player.turn(f"{self.config.word} {hint}")
        assert player.trace.rewards["found"] is not None

    async def finalize(self, task, episode):
        (trace,) = [trace for trace in episode.traces if trace.agent.name == "player"]
        trace.record_reward("short", 1.0 / trace.num_turns, 0.5)

__all__ = ["GuessTaskset", "GuessEnv"]
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check_needs("verifiers")
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(name: str, text: str, **values: str) -> None:
        monkeypatch.delitem(sys.modules, name, raising=False)
        for key, value in values.items():
            text = text.replace("{" + key + "}", value)
        (tmp_path / f"{name}.py").write_text(text)

    return put


def call(name: str, far: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"far": {far}}}}}\n</tool_call>'


def robot(write, prefix: str = '""', config: str = "", extra: str = "") -> Conversing:
    write("p2prl_robot", ROBOT, prefix=prefix, config=config, extra=extra)
    made = load_taskset("p2prl_robot", {})
    assert isinstance(made, Conversing)
    return made


def test_tools_are_told_called_and_answer_and_the_state_is_the_rollouts(write) -> None:
    made = robot(write)
    assert isinstance(made, TasksetEnvironment)
    told = made.prompt(3)
    assert told.startswith("You have legs.\n\n") and told.endswith("\n\nFind wall 3.")
    assert '"name": "legs_step"' in told and '"far": {"title": "Far", "type": "integer"}' in told
    first, second = f"I go. {call('legs_step', 2)}", call("legs_step", 1) + call("legs_step", 0)
    assert made.respond(3, [first]) == "<tool_response>\nat 2\n</tool_response>"
    both = "<tool_response>\nwall\n</tool_response>\n<tool_response>\nwall\n</tool_response>"
    assert made.respond(3, [first, second]) == both
    assert made.respond(3, [first, second, "There it is."]) is None
    assert made.reward_turns(3, [first, second, "There it is."]) == (1.0, "near 1, used 3")
    assert made.reward_turns(3, [first]) == (0.9, "near 0.9, used 0"), "what no model was told is not in the trace"
    assert made.respond(3, [first]) == "<tool_response>\nat 2\n</tool_response>", "nothing was kept"


def test_a_wrong_call_is_answered_and_a_raising_tool_too(write) -> None:
    made = robot(write, prefix="None")
    answers = {
        call("step", 13): "unlucky",
        call("jump", 1): "error: unknown tool 'jump'",
        call("step", '"far"'): "far",
        '<tool_call>{"name": "step", "arguments": [1]}</tool_call>': "must be a JSON object, got list",
    }
    for answer, said in answers.items():
        response = made.respond(3, [answer])
        assert response is not None and said in response
    assert made.respond(3, ["<tool_call>{step</tool_call>"]) is None, "no call, but text"
    assert made.respond(3, [call("step", 101)]) is None, "a stop comes before the model is asked again"
    assert made.reward_turns(3, [call("step", 101)]) == (0.0, "near 0, used 0")


def test_what_no_call_can_be_read_from_is_text_and_never_a_fault(write) -> None:
    """Whoever can make an environment raise ends a conversation where he likes."""
    made, surrogate = robot(write), "\\ud800"
    deep, near = ("[" * depth + "]" * depth for depth in (20_000, 120))
    for name, arguments in (("legs_step", deep), ("legs_step", near), (surrogate, "{}"), ("legs_step", "9" * 5000)):
        assert made.respond(3, [f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>']) is None
    shallow = "[" * 90 + "]" * 90
    for arguments in (f'{{"far": "{surrogate}"}}', f'{{"{surrogate}": 1}}', f'{{"far": {shallow}}}', shallow):
        said = made.respond(3, [f'<tool_call>{{"name": "legs_step", "arguments": {arguments}}}</tool_call>'])
        assert said is not None and said.startswith("<tool_response>\n") and said.encode()


def test_a_conversation_played_once_says_what_it_says_turn_by_turn(write) -> None:
    made = robot(write, extra=INTERCEPTS)
    assert isinstance(made, Replaying)
    answers = [call("legs_step", 1), call("legs_step", 13) + call("jump", 1), call("legs_step", 2), "Done.", "More."]
    asked = [made.respond(3, answers[:number]) for number in range(1, 6)]
    assert asked[3:] == [None, None] and made.responses(3, answers) == asked[:3]
    talks = guessing(write)
    assert isinstance(talks, Replaying) and isinstance(talks, Conversing)
    guesses = ["5", "9", "8", "7"]
    assert talks.responses(7, guesses) == [talks.respond(7, guesses[:number]) for number in (1, 2, 3)]


INTERCEPTS = """
    @vf.intercept
    async def mumble(self, request: vf.Request) -> vf.Request:
        for message in request.messages:
            if isinstance(message, vf.ToolMessage) and message.content:
                message.content = message.content.upper()
        return request
"""
REWRITES = """
    @vf.intercept
    async def censor(self, response: vf.Response) -> None:
        return None
"""


def test_what_a_task_makes_of_a_tools_result_is_what_the_model_sees(write) -> None:
    made = robot(write, extra=INTERCEPTS)
    assert made.respond(3, [call("legs_step", 1)]) == "<tool_response>\nAT 1\n</tool_response>"


def guessing(write, prompt: str = '"Guess."', opening: str = "", max_turns: str = "None", seats: str = "", **params):
    write("p2prl_guess", GUESSING, prompt=prompt, opening=opening, max_turns=max_turns, seats=seats)
    return load_taskset("p2prl_guess", params)


def test_an_environment_speaks_as_the_user(write) -> None:
    made = guessing(write, env={"word": "no,"})
    assert isinstance(made, Conversing)
    assert made.prompt(7) == "Guess."
    assert made.respond(7, ["5"]) == "no, higher"
    assert made.respond(7, ["5", "9"]) == "no, lower"
    assert made.respond(7, ["5", "9", "7"]) is None
    assert made.reward_turns(7, ["7"]) == (1.0, "found 1, short 1")
    assert made.reward_turns(7, ["5", "7"])[0] == pytest.approx(1.25 / 1.5)
    assert made.reward_turns(7, ["5"])[0] == pytest.approx(0.5 / 1.5)
    with pytest.raises(BaseExceptionGroup) as raised:
        made.respond(7, ["five"])
    assert raised.group_contains(ValueError, match="invalid literal")


def test_the_user_may_speak_first_and_the_agent_has_its_own_limit(write) -> None:
    made = guessing(write, prompt="None", opening='f"Below {task.data.number + 5}?"', max_turns="2")
    assert isinstance(made, Conversing)
    assert made.prompt(7) == "Below 12?"
    assert made.respond(7, ["5"]) == "try higher"
    assert made.respond(7, ["5", "6"]) is None


HANGS = """
    @vf.intercept
    async def wait(self, request: vf.Request) -> None:
        import asyncio, time
        if any(isinstance(message, vf.ToolMessage) for message in request.messages):
            {how}
"""


@pytest.mark.parametrize("how", ["await asyncio.sleep(60)", "while True: time.sleep(0.01)"])
def test_a_task_that_hangs_between_turns_is_cut_off(write, how: str) -> None:
    made = robot(write, extra=HANGS.replace("{how}", how))
    guard = LimitGuard(Limits(call_s=0.5))
    with pytest.raises(RanTooLong, match="longer than 0.5 s"):
        guard(lambda: made.respond(3, [call("legs_step", 1)]))
    assert guard(lambda: made.respond(3, ["done"])) is None


def test_an_environment_that_hangs_among_tasks_is_cut_off(write) -> None:
    write(
        "p2prl_guess", GUESSING + "\nasync def forever():\n    while True: __import__('time').sleep(0.01)\n",
        prompt="None", opening="await forever()", max_turns="None", seats="",
    )  # fmt: skip
    made = load_taskset("p2prl_guess", {})
    with pytest.raises(RanTooLong, match=r"longer than 0.5 s"):
        LimitGuard(Limits(call_s=0.5))(lambda: made.prompt(7))


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (robot, {"extra": REWRITES}, "rewrites answers"),
        (robot, {"config": 'url="http://127.0.0.1:1/mcp"'}, "has tool servers elsewhere"),
        (guessing, {"seats": "    user: vf.AgentConfig = vf.AgentConfig()"}, "has 2 agents"),
        (guessing, {"envy": {}}, "no parameter 'envy'; did you mean 'env'"),
        (guessing, {"env": {"wrod": "no"}}, "can't be made from"),
    ],
)
def test_what_can_not_be_played_here_is_a_sentence(write, make, values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(write, **values)


def test_without_the_package_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verifiers", "verifiers.v1", "verifiers.v1.utils", "verifiers.v1.utils.loaders"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'p2prl\[verifiers\]'"):
        load_taskset("doubles", {})
