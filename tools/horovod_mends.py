"""What is changed in Horovod 0.28.1's source, and why: texts to replace, each with its reason.

`NATIVE` is compiled, so a change there means a build of minutes. `PYTHON` is changed in the built wheel, in seconds.
The elastic launcher's mends have one design: see DESIGN.md, "The launcher". `python -m tools.horovod_mends` prints the
table of docs/HOROVOD.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """One replacement in one file. `old` must occur exactly once; `{std}` stands for the C++ standard."""

    path: str
    old: str
    new: str
    why: str


_CXX_STANDARD = "torch's headers need C++{std}"

_PROCESS_SETS = (
    "process sets use the interface of the global context, not the address of the host name, and close their "
    "connections when they end: without it, survivors of a dead worker wait 30 s for each other"
)

_INIT_RAISES = (
    "hvd.init() raises, and can be called again, when a worker dies while the world forms: without it, survivors "
    "are aborted"
)

_GLOO_ERROR = "what Gloo throws"

_INIT_AGAIN = "hvd.init() can be called again after it failed"

_GIVES_UP = "a worker that waits for one that died while the world formed gives up after 30 s, not 150"

_ASKS_BY_SLOT = (
    "a worker of an elastic job asks for its place by the slot it was started in, which stays; its local rank "
    "changes when another worker of its host dies"
)

_KNOWS_ITS_BUILD = (
    "horovodrun knows what it was built with: without it, it imports torch once or twice to ask, 1.5 s each"
)

_TELLS_RANK_0 = (
    "the launcher tells rank 0 of changed hosts without holding the lock that a new world needs: without it, "
    "survivors wait for minutes when the host of rank 0 is switched off or cut off"
)

_STARTED_AGAIN = (
    "a worker that died is started again also when the cooldown of its host ends while the launcher looks for "
    "hosts: without it, the launcher takes it for alive, and no world forms any more"
)

_ONE_MACHINE = (
    "an elastic job on this machine alone needs no --network-interface: without it, the launcher waits for a "
    "second host for minutes"
)

_LAST_LINE = "the launcher's last line says why a job failed, or that it was interrupted"

_DIES_ASKING = "a worker that dies while it asks the launcher shows no traceback of the launcher"

NATIVE = (
    Patch("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD {std})", _CXX_STANDARD),
    Patch(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD {std})",
        _CXX_STANDARD,
    ),
    Patch(
        "horovod/common/gloo/gloo_context.cc",
        "  attr device_attr;\n  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;",
        "  gloo_iface_ = global_context.gloo_iface_;\n"
        "  enabled_ = true;\n"
        "  attr device_attr;\n  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;",
        _PROCESS_SETS,
    ),
    Patch(
        "horovod/common/operations.cc",
        "    global_gloo_context.Initialize(ParseGlooIface());\n  }\n"
        "  if (state.control_operation == LibType::GLOO) {\n"
        "    // Initializes global controller\n"
        "    state.process_set_table.Initialize(global_gloo_context);\n  }\n",
        "    try {\n"
        "      global_gloo_context.Initialize(ParseGlooIface());\n"
        "      if (state.control_operation == LibType::GLOO) {\n"
        "        state.process_set_table.Initialize(global_gloo_context);\n"
        "      }\n"
        "    } catch (const gloo::Exception& ex) {\n"
        '      LOG(ERROR) << "Horovod could not be initialized: " << ex.what();\n'
        "      state.process_set_table.Finalize(global_gloo_context, SHUT_DOWN_ERROR);\n"
        "      global_gloo_context.Finalize();\n"
        "      state.initialization_failed = true;\n"
        "      return;\n"
        "    }\n"
        "  }\n",
        _INIT_RAISES,
    ),
    Patch(
        "horovod/common/operations.cc",
        '#include "gloo/gloo_controller.h"\n',
        '#include "gloo/common/error.h"\n#include "gloo/gloo_controller.h"\n',
        _GLOO_ERROR,
    ),
    Patch(
        "horovod/common/operations.cc",
        "    // Reset initialization flag\n    horovod_global.initialization_done = false;\n",
        "    // Reset initialization flag\n    horovod_global.initialization_done = false;\n"
        "    horovod_global.initialization_failed = false;\n",
        _INIT_AGAIN,
    ),
    Patch(
        "third_party/gloo/gloo/transport/tcp/pair.h",
        "        timeout_ * 5,\n",
        "        timeout_,\n",
        _GIVES_UP,
    ),
    Patch(
        "horovod/common/gloo/gloo_context.cc",
        '    auto key = hostname_ + ":" + std::to_string(local_rank);\n',
        '    auto key = hostname_ + ":" + std::to_string(GetIntEnvOrDefault("HOROVOD_SLOT", local_rank));\n',
        _ASKS_BY_SLOT,
    ),
)

_BY_SLOT = (
    "the launcher counts failures by slot: a dead worker's slot rests for seconds, its host goes on; without it, one "
    "dead worker takes all workers of its host along"
)

_FINISHED = (
    "an elastic job that its survivors finish has succeeded, also if the killed ones were not replaced yet, or "
    "if a replacement fails that came too late: without it, horovodrun reports those as the job's failure"
)

_EXIT_STATUS = (
    "a worker that is ended keeps its exit status for the one who waits for it: without it, horovodrun that got "
    "SIGTERM sometimes reports success"
)

_SAYS_WHAT_IT_WAITS_FOR = "the launcher says what it waits for, after seconds"

_INTERRUPTED = (
    "a launcher that is interrupted says so in one line and exits with 128 + the signal's number; no traceback"
)

_CTRL_C = "Ctrl-C in a terminal reaches the launcher alone: without it, helpers that are just starting show tracebacks"

_STARTS_AGAIN = (
    "a worker that starts goes on when another one dies while the world forms: without it, it ends with a "
    "traceback, and so does the job where no other worker is left"
)

_LOG_FILES = "log files: one worker is allowed, and in an elastic job each slot has its own, which later workers add to"

_DISCOVERY = (
    "the launcher runs the discovery script from a shell: without it, each run, one a second, starts a Python process "
    "that imports the launcher first, which costs more than a tenth of a core"
)

_BETWEEN_WORLDS = (
    "hvd.rank() and its like answer as of the last world while an elastic job forms the next one: without it, a script "
    "that asks in its loop ends when a worker dies in an asynchronous mode, where training goes on meanwhile"
)
PYTHON = (
    # As BUILD_FLAGS has it.
    *(
        Patch(
            "horovod/common/util.py",
            f"def {what}_built(verbose=False):\n"
            "    for ext_base_name in EXTENSIONS:\n"
            f"        built_fn = lambda ext: ext.{what}_built()\n",
            f"def {what}_built(verbose=False):\n"
            f"    return {built}\n"
            "    for ext_base_name in EXTENSIONS:\n"
            f"        built_fn = lambda ext: ext.{what}_built()\n",
            _KNOWS_ITS_BUILD,
        )
        for what, built in (("gloo", True), ("mpi", False))
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        "                    self._notify_workers_host_changes(self._host_manager.current_hosts, update_res)\n",
        "                    changes = (self._host_manager.current_hosts, update_res)\n"
        "                    tell = self._notify_workers_host_changes\n"
        "                    threading.Thread(target=tell, args=changes, daemon=True).start()\n",
        _TELLS_RANK_0,
    ),
    Patch(
        "horovod/runner/common/util/safe_shell_exec.py",
        "    try:\n        p.wait(timeout=GRACEFUL_TERMINATION_TIME_S)\n    except psutil.TimeoutExpired:\n",
        "    deadline = time.monotonic() + GRACEFUL_TERMINATION_TIME_S\n"
        "    with contextlib.suppress(ChildProcessError):\n"
        "        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:\n"
        "            if time.monotonic() > deadline:\n"
        "                break\n"
        "            time.sleep(0.01)\n"
        "    if p.is_running():\n",
        _EXIT_STATUS,
    ),
    Patch(
        "horovod/runner/common/util/safe_shell_exec.py",
        "import codecs\n",
        "import codecs\nimport contextlib\n",
        _EXIT_STATUS,
    ),
    # --- one slot at a time: what a dead worker costs the others of its host ---
    Patch(
        "horovod/runner/elastic/discovery.py",
        """\
DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS = 1 * 60 * 60
""",
        """\
DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS = 1 * 60 * 60

# A slot whose worker failed while others of its host live is closed for a while, longer each time; after
# so many failures, each within so many seconds of the one before, for good.
SLOT_COOLDOWN_RANGE = (1, 60)
SLOT_FAILURES = 5
SLOT_FORGIVEN_AFTER_SECONDS = 600
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/discovery.py",
        """\
            self._cooldown_upper_limit = -1
        self._cooldown_period_end_ts = 0
""",
        """\
            self._cooldown_upper_limit = -1
        self._cooldown_period_end_ts = 0
        self._slot_failures = {}  # slot -> (failures in a row, when the last one was)
        self._closed_slots = {}  # slot -> when it opens again
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/discovery.py",
        """\
            return not self._in_cooldown_period(time.time())
        return False
""",
        """\
            return not self._in_cooldown_period(time.time())
        return False

    def close_slot(self, slot):
        # Returns failures in a row, and the seconds until it opens again.
        failures, last = self._slot_failures.get(slot, (0, 0.0))
        now = time.monotonic()
        failures = failures + 1 if now - last < SLOT_FORGIVEN_AFTER_SECONDS else 1
        self._slot_failures[slot] = (failures, now)
        lower, upper = SLOT_COOLDOWN_RANGE  # a host's own is for machines that are away
        again = failures < SLOT_FAILURES
        delay = max(lower, min(upper, lower * (1 << failures))) if again else float('inf')
        self._closed_slots[slot] = now + delay
        return failures, delay

    def reopen_slots(self):
        # Opens the slots whose time has come. Returns whether there were any.
        due = [slot for slot, until in list(self._closed_slots.items()) if until <= time.monotonic()]
        for slot in due:
            del self._closed_slots[slot]
        return bool(due)

    def open_slots(self, slots):
        return [slot for slot in range(slots) if slot not in self._closed_slots]
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/discovery.py",
        """\
        self._host_slots = host_slots
        self._host_assignment_order = host_assignment_order

    @property
    def host_slots""",
        """\
        self._host_slots = host_slots
        self._host_assignment_order = host_assignment_order
        self._open_slots = {}

    @property
    def host_slots""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/discovery.py",
        """\
    def get_slots(self, host):
        return self._host_slots.get(host, 0)
""",
        """\
    def get_slots(self, host):
        return len(self.get_open_slots(host))

    def get_open_slots(self, host):
        # Numbers of the slots that may have a worker.
        return self._open_slots.get(host, list(range(self._host_slots.get(host, 0))))
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/discovery.py",
        """\
                                       if not hosts_state[host].is_blacklisted()]
        return self
""",
        """\
                                       if not hosts_state[host].is_blacklisted()]
        self._open_slots = {host: hosts_state[host].open_slots(n) for host, n in self._host_slots.items()}
        return self
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/discovery.py",
        """\
    def update_available_hosts(self):
""",
        """\
    def update_available_hosts(self):
        update = self._update_available_hosts()
        reopened = [state.reopen_slots() for state in list(self._hosts_state.values())]
        return update | HostUpdateResult.added if any(reopened) else update

    def _update_available_hosts(self):
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/discovery.py",
        """\
    def is_blacklisted(self, host):
        return self._hosts_state[host].is_blacklisted()

""",
        """\
    def is_blacklisted(self, host):
        return self._hosts_state[host].is_blacklisted()

    def close_slot(self, host, slot):
        failures, delay = self._hosts_state[host].close_slot(slot)
        then = f'it is started again in {delay:.0f} s' if delay < float('inf') else 'its slot is given up'
        print(f'horovodrun: worker {host}[{slot}] failed (failure {failures} of {SLOT_FAILURES}); {then}',
              file=sys.stderr, flush=True)

""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/discovery.py",
        """\
import random
import threading
""",
        """\
import random
import subprocess
import sys
import threading
""",
        _DISCOVERY,
    ),
    Patch(
        "horovod/runner/elastic/registration.py",
        """\
        failures = self.get(FAILURE)
        for host, slot in failures:
            self._host_manager.blacklist(host)
""",
        """\
        # A host is given up when no worker of it lives; else the slots that failed are closed for a while.
        failures = self.get(FAILURE)
        living = {host for host, slot in self.get_recorded_slots() if (host, slot) not in failures}
        for host, slot in sorted(failures):
            if host in living:
                self._host_manager.close_slot(host, slot)
            else:
                self._host_manager.blacklist(host)
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        """\
        return self._worker_clients.get((slot_info.hostname, slot_info.local_rank))
""",
        """\
        return self._worker_clients.get((slot_info.hostname, slot_info.slot))
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        """\
        return host in self._host_assignments and len(self._host_assignments[host]) > slot
""",
        """\
        return host in self._host_assignments and slot in self._host_assignments[host]
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        """\
        active_slots = set([(host, slot_info.local_rank)
                            for host, slots in self._host_assignments.items()
                            for slot_info in slots])
""",
        """\
        active_slots = set([(host, slot)
                            for host, slots in self._host_assignments.items()
                            for slot in slots
                            if (host, slot) not in self._worker_registry.get('FAILURE')])
""",
        _STARTED_AGAIN,
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        """\
                         for slot_info in slots
                         if (host, slot_info.local_rank) not in active_slots]
""",
        """\
                         for slot, slot_info in slots.items()
                         if (host, slot) not in active_slots]
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        """\
        host_list = [hosts.HostInfo(host, current_hosts.get_slots(host))
                     for host in current_hosts.host_assignment_order]
""",
        """\
        # Slots that have a worker come first, in the order of their ranks: no newcomer is before them.
        failures, slots_of = self._worker_registry.get('FAILURE'), {}
        for host in list(current_hosts.host_assignment_order):
            free = current_hosts.get_open_slots(host)
            before = self._host_assignments.get(host, ())
            stay = [slot for slot in before if slot in free and (host, slot) not in failures]
            slots_of[host] = stay + [slot for slot in free if slot not in stay]
        host_list = [hosts.HostInfo(host, len(slots)) for host, slots in slots_of.items()]
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        """\
        host_assignments = defaultdict(list)
        for slot_info in host_assignments_list:
            host_assignments[slot_info.hostname].append(slot_info)
""",
        """\
        host_assignments = defaultdict(dict)
        for slot_info in host_assignments_list:
            slot_info.slot = slots_of[slot_info.hostname][slot_info.local_rank]
            host_assignments[slot_info.hostname][slot_info.slot] = slot_info
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        """\
        if not self.has_rank_assignment(slot_info.hostname, slot_info.local_rank):
""",
        """\
        if not self.has_rank_assignment(slot_info.hostname, slot_info.slot):
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        """\
            rendezvous_id = self._worker_registry.record_success(slot_info.hostname, slot_info.local_rank)
""",
        """\
            rendezvous_id = self._worker_registry.record_success(slot_info.hostname, slot_info.slot)
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        """\
            rendezvous_id = self._worker_registry.record_failure(slot_info.hostname, slot_info.local_rank)
""",
        """\
            rendezvous_id = self._worker_registry.record_failure(slot_info.hostname, slot_info.slot)
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        """\
            name = '{}[{}]'.format(slot_info.hostname, slot_info.local_rank)
""",
        """\
            name = '{}[{}]'.format(slot_info.hostname, slot_info.slot)
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/elastic/worker.py",
        """\
                int(os.environ.get(HOROVOD_LOCAL_RANK))
""",
        """\
                int(os.environ.get('HOROVOD_SLOT', os.environ.get(HOROVOD_LOCAL_RANK)))
""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/common/util/hosts.py",
        """\
    cross_size: int

    def to_response_string""",
        """\
    cross_size: int
    slot: int = -1  # of an elastic job: which of the host's; a worker keeps it, its local rank may change

    def to_response_string""",
        _BY_SLOT,
    ),
    Patch(
        "horovod/runner/gloo_run.py",
        """\
    return horovod_rendez_env


def _slot_info""",
        """\
    if slot_info.slot >= 0:
        horovod_rendez_env["HOROVOD_SLOT"] = str(slot_info.slot)
    return horovod_rendez_env


def _slot_info""",
        _BY_SLOT,
    ),
    # --- what an idle launcher costs ---
    Patch(
        "horovod/runner/elastic/discovery.py",
        """\
class HostDiscoveryScript(HostDiscovery):
""",
        """\
# Runs the command $1. The launcher holds the other end of standard input: when the launcher dies, the command ends.
DISCOVERY_SHELL = '''
exec 3<&0 </dev/null
(read -r _ <&3; trap '' TERM; kill -s TERM 0; sleep 5; kill -s KILL 0) >/dev/null 2>&1 &
/bin/sh -c "$1" 3<&-
status=$?
kill $!
exit $status
'''


class HostDiscoveryScript(HostDiscovery):
""",
        _DISCOVERY,
    ),
    Patch(
        "horovod/runner/elastic/discovery.py",
        """\
        stdout = io.StringIO()
        exit_code = safe_shell_exec.execute(
            self._discovery_script, stdout=stdout)
        if exit_code != 0:
            raise RuntimeError(
                'Failed to execute discovery script: {}. Exit code: {}' .format(
                    self._discovery_script, exit_code))
        return stdout.getvalue()
""",
        """\
        with subprocess.Popen(['/bin/sh', '-c', DISCOVERY_SHELL, 'sh', self._discovery_script], encoding='utf-8',
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as script:
            stdout = script.stdout.read()
        if script.returncode != 0:
            raise RuntimeError(
                'Failed to execute discovery script: {}. Exit code: {}' .format(
                    self._discovery_script, script.returncode))
        return stdout
""",
        _DISCOVERY,
    ),
    # --- how an elastic job ends ---
    Patch(
        "horovod/runner/elastic/driver.py",
        """\
        self._worker_registry.reset(self.world_size())
""",
        """\
        started = self._worker_registry.last_rendezvous() > 0
        self.newcomers = {f'{one.hostname}[{one.slot}]' for one in pending_slots if started}
        self._worker_registry.reset(self.world_size())
""",
        _FINISHED,
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        """\
        self._world_size = 0

        self._wait_hosts_cond""",
        """\
        self._world_size = 0
        self.newcomers = set()  # workers of this world that were started into a running job

        self._wait_hosts_cond""",
        _FINISHED,
    ),
    Patch(
        "horovod/runner/gloo_run.py",
        """\
        for name, value in sorted(res.worker_results.items(), key=lambda item: item[1][1]):
            exit_code, timestamp = value
            if exit_code != 0:
""",
        """\
        done = any(exit_code == 0 for exit_code, timestamp in res.worker_results.values())
        for name, value in sorted(res.worker_results.items(), key=lambda item: item[1][1]):
            exit_code, timestamp = value
            if exit_code != 0 and done and (exit_code > 128 or name in driver.newcomers):
                print(f'horovodrun: worker {name} ended with exit code {exit_code}; the others have finished '
                      'the job, so it has succeeded', file=sys.stderr, flush=True)
                continue
            if exit_code != 0:
""",
        _FINISHED,
    ),
    # --- nobody waits in silence ---
    Patch(
        "horovod/runner/gloo_run.py",
        """\
        current_hosts = driver.wait_for_available_slots(settings.num_proc, min_hosts=min_hosts)
        return driver_service""",
        """\
        current_hosts = driver.wait_for_available_slots(settings.num_proc)
        if min_hosts > 1 and not network.filter_local_addresses(current_hosts.host_assignment_order):
            nics = driver_service.get_local_interfaces(settings)
            print(f'horovodrun: all hosts are this machine, so workers use the interface {", ".join(nics)}. '
                  'If other hosts are to join later, name the interface they share: --network-interface NAME',
                  file=sys.stderr, flush=True)
            return nics
        current_hosts = driver.wait_for_available_slots(settings.num_proc, min_hosts=min_hosts)
        return driver_service""",
        _ONE_MACHINE,
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        """\
        self._wait_hosts_cond.acquire()
        try:
            while True:
                current_hosts = self._host_manager.current_hosts
""",
        """\
        asked = told = time.monotonic()
        self._wait_hosts_cond.acquire()
        try:
            while True:
                current_hosts = self._host_manager.current_hosts
""",
        _SAYS_WHAT_IT_WAITS_FOR,
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        """\
                self._wait_hosts_cond.wait(tmout.remaining())
""",
        """\
                left = told + (5 if told == asked else 60) - time.monotonic()
                if left <= 0:
                    told = time.monotonic()
                    print(f'horovodrun: waiting for {min_num_proc} free slots on {min_hosts} host(s) or more; '
                          f'there are {avail_slots} on {avail_hosts}; discovered: {current_hosts.host_slots}.'
                          f'{extra_message} It gives up in {tmout.remaining():.0f} s (--elastic-timeout)',
                          file=sys.stderr, flush=True)
                self._wait_hosts_cond.wait(min(tmout.remaining(), left if left > 0 else 60))
""",
        _SAYS_WHAT_IT_WAITS_FOR,
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        """\
import queue
import threading
""",
        """\
import queue
import sys
import threading
""",
        _SAYS_WHAT_IT_WAITS_FOR,
    ),
    Patch(
        "horovod/runner/elastic/driver.py",
        "message='Timed out waiting for {{activity}}.",
        "message='Timed out waiting for {activity}.",
        _SAYS_WHAT_IT_WAITS_FOR,
    ),
    # --- Ctrl-C and logs ---
    Patch(
        "horovod/runner/elastic/registration.py",
        """\
            logging.error('failure count == {} -> stop running'.format(self._size))
""",
        """\
            logging.info('failure count == {} -> stop running'.format(self._size))
""",
        _LAST_LINE,
    ),
    Patch(
        "horovod/runner/gloo_run.py",
        """\
def register_shutdown_event():
""",
        """\
ended_by = []  # the numbers of the signals that asked this launcher to end


def register_shutdown_event():
""",
        _INTERRUPTED,
    ),
    Patch(
        "horovod/runner/gloo_run.py",
        """\
    def set_event_on_signal(signum, frame):
        event.set()
""",
        """\
    def set_event_on_signal(signum, frame):
        ended_by.append(signum)
        event.set()
""",
        _INTERRUPTED,
    ),
    Patch(
        "horovod/runner/gloo_run.py",
        """\
            if exit_code != 0:
                print('Process {idx} exit""",
        """\
            if exit_code != 0 and not ended_by:
                print('Process {idx} exit""",
        _INTERRUPTED,
    ),
    Patch(
        "horovod/runner/launch.py",
        """\
from horovod.runner.gloo_run import gloo_run, gloo_run_elastic
""",
        """\
from horovod.runner.gloo_run import ended_by, gloo_run, gloo_run_elastic
""",
        _INTERRUPTED,
    ),
    Patch(
        "horovod/runner/launch.py",
        """\
        logging.basicConfig(level=logging.getLevelName(args.log_level))

    _run(args)
""",
        """\
        logging.basicConfig(level=logging.getLevelName(args.log_level))

    try:
        _run(args)
    except KeyboardInterrupt:
        ended_by.append(signal.SIGINT)
    except (RuntimeError, timeout.TimeoutException) as error:
        if not ended_by:
            sys.exit(f'horovodrun: {error}')
    else:
        return
    sys.stdout.flush()
    print('horovodrun: interrupted', file=sys.stderr, flush=True)
    sys.exit(128 + ended_by[0])
""",
        _INTERRUPTED,
    ),
    Patch(
        "horovod/runner/launch.py",
        """\
import os
import sys
import textwrap
""",
        """\
import os
import signal
import sys
import textwrap
""",
        _INTERRUPTED,
    ),
    Patch(
        "horovod/runner/common/util/safe_shell_exec.py",
        """\
    middleman.start()
""",
        """\
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        middleman.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
""",
        _CTRL_C,
    ),
    Patch(
        "horovod/runner/common/util/safe_shell_exec.py",
        """\
    w.close()
    os.setsid()
""",
        """\
    w.close()
    os.setsid()
    signal.signal(signal.SIGINT, lambda number, frame: None)  # what it starts has the default again
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
""",
        _CTRL_C,
    ),
    *(
        Patch(
            "horovod/common/basics.py",
            f"        {what} = self.MPI_LIB_CTYPES.horovod_{what}()\n",
            f"        {what} = self._now_or_last('{what}', self.MPI_LIB_CTYPES.horovod_{what}())\n",
            _BETWEEN_WORLDS,
        )
        for what in ("size", "local_size", "cross_size", "rank", "local_rank", "cross_rank")
    ),
    Patch(
        "horovod/runner/http/http_server.py",
        """\
            self.send_response(200)
            self.send_header("Content-Length", str(len(value)))
            self.end_headers()
            self.wfile.write(value)
""",
        """\
            try:
                self.send_response(200)
                self.send_header("Content-Length", str(len(value)))
                self.end_headers()
                self.wfile.write(value)
            except ConnectionError:  # whoever asked has died
                self.close_connection = True
""",
        _DIES_ASKING,
    ),
    Patch(
        "horovod/common/basics.py",
        """\
    def shutdown(self):
        \"""A function that shuts Horovod down.\"""
""",
        """\
    def _now_or_last(self, what, now):
        return self.__dict__.get('_last_world', {}).get(what, now) if now == -1 else now

    def shutdown(self):
        \"""A function that shuts Horovod down.\"""
        if os.environ.get('HOROVOD_ELASTIC') == '1' and self.is_initialized():
            self._last_world = {
                what: getattr(self.MPI_LIB_CTYPES, 'horovod_' + what)()
                for what in ('size', 'local_size', 'cross_size', 'rank', 'local_rank', 'cross_rank')
            }
""",
        _BETWEEN_WORLDS,
    ),
    Patch(
        "horovod/common/basics.py",
        """\
        if not initialization_ok:
            raise ValueError(
""",
        """\
        if os.environ.get('HOROVOD_ELASTIC') == '1' and not hasattr(self, '_last_world'):  # the first world of a worker
            self._first_asked = getattr(self, '_first_asked', time.monotonic())
            if not initialization_ok and time.monotonic() - self._first_asked < 60:
                print('Horovod: a worker died while this one joined; asking for a place in the next world',
                      file=sys.stderr, flush=True)
                self.shutdown()
                time.sleep(0.5)
                return self.init(comm, process_sets)
        if not initialization_ok:
            raise ValueError(
""",
        _STARTS_AGAIN,
    ),
    Patch(
        "horovod/common/basics.py",
        """\
import os
""",
        """\
import os
import sys
import time
""",
        _STARTS_AGAIN,
    ),
    Patch(
        "horovod/runner/gloo_run.py",
        """\
    width = int(math.log10(size - 1)) + 1
""",
        """\
    width = int(math.log10(max(1, size - 1))) + 1
""",
        _LOG_FILES,
    ),
    Patch(
        "horovod/runner/gloo_run.py",
        """\
            output_dir_rank = os.path.join(settings.output_filename, 'rank.{rank}'.format(rank=padded_rank))
            if not os.path.exists(output_dir_rank):
                os.mkdir(output_dir_rank)

            stdout_file = open(os.path.join(output_dir_rank, 'stdout'), 'w')
            stderr_file = open(os.path.join(output_dir_rank, 'stderr'), 'w')
""",
        """\
            name = f'{host_name}.{slot_info.slot}' if slot_info.slot >= 0 else f'rank.{padded_rank}'
            output_dir_rank = os.path.join(settings.output_filename, name)
            os.makedirs(output_dir_rank, exist_ok=True)

            mode = 'a' if slot_info.slot >= 0 else 'w'
            stdout_file = open(os.path.join(output_dir_rank, 'stdout'), mode)
            stderr_file = open(os.path.join(output_dir_rank, 'stderr'), mode)
""",
        _LOG_FILES,
    ),
)

_HOROVOD, _FIRST_HOUR = "tests/processes/test_horovod.py::", "tests/first_hour/test_launcher.py::"
_DIES_IN_FORMING = f"{_HOROVOD}test_a_worker_that_dies_while_the_world_forms_does_not_take_the_others_along"
_KILLED_OF_THREE = f"{_FIRST_HOUR}test_a_killed_worker_of_three_on_one_host_costs_no_sample_and_is_replaced"
TESTS: Mapping[str, str] = {
    _CXX_STANDARD: "tests/unit/test_build_horovod.py::test_patches_change_what_they_name_and_nothing_else",
    _PROCESS_SETS: "tests/processes/test_elastic.py::test_a_worker_killed_there_changes_no_parameter",
    _INIT_RAISES: _DIES_IN_FORMING,
    _GLOO_ERROR: _DIES_IN_FORMING,
    _INIT_AGAIN: _DIES_IN_FORMING,
    _GIVES_UP: _DIES_IN_FORMING,
    _ASKS_BY_SLOT: _KILLED_OF_THREE,
    _KNOWS_ITS_BUILD: f"{_HOROVOD}test_what_horovod_was_built_with_is_known_without_torch",
    _TELLS_RANK_0: "tests/hosts/test_lost_hosts.py::test_a_host_that_is_switched_off_takes_only_its_own_rows_along",
    _EXIT_STATUS: f"{_HOROVOD}test_a_worker_that_is_ended_keeps_its_exit_status_for_the_launcher",
    _BY_SLOT: f"{_HOROVOD}test_a_slot_that_fails_rests_longer_each_time_and_is_given_up",
    _DISCOVERY: f"{_HOROVOD}test_a_discovery_script_is_run_by_a_shell_and_its_changed_answer_is_seen",
    _STARTED_AGAIN: f"{_HOROVOD}test_a_worker_that_died_is_started_again_although_its_host_is_taken_back_at_once",
    _FINISHED: f"{_HOROVOD}test_a_job_that_survivors_finish_has_succeeded_although_a_newcomer_fails_at_the_end",
    _ONE_MACHINE: _KILLED_OF_THREE,
    _SAYS_WHAT_IT_WAITS_FOR: f"{_HOROVOD}test_an_elastic_job_says_what_it_waits_for",
    _LAST_LINE: f"{_HOROVOD}test_each_slot_has_its_log_and_the_last_line_says_why_the_job_failed",
    _INTERRUPTED: f"{_FIRST_HOUR}test_ctrl_c_is_one_line",
    _CTRL_C: f"{_FIRST_HOUR}test_ctrl_c_is_one_line",
    _BETWEEN_WORLDS: f"{_HOROVOD}test_between_worlds_an_elastic_worker_has_the_place_of_the_last_one",
    _DIES_ASKING: f"{_HOROVOD}test_a_worker_that_died_while_it_asked_the_launcher_is_no_error",
    _STARTS_AGAIN: "tests/processes/test_elastic.py::test_a_worker_killed_in_the_first_agreement",
    _LOG_FILES: f"{_HOROVOD}test_each_slot_has_its_log_and_the_last_line_says_why_the_job_failed",
}


def table() -> str:
    """The mends in Markdown, one a row: the reason, the files it changes, the test that exercises it."""
    paths: dict[str, set[str]] = {}
    for patch in NATIVE + PYTHON:
        paths.setdefault(patch.why, set()).add(patch.path)
    rows = ["| what it changes, and what happens without it | files | test |", "|---|---|---|"]
    for why, changed in paths.items():
        files = ", ".join(f"`{path}`" for path in sorted(changed))
        rows.append(f"| {why.replace('{std}', ' as torch was built with')} | {files} | `{TESTS[why]}` |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
