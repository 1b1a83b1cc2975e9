"""Writes docs/alerts.md: the alerts of packaging/prometheus as a table. Run it after a rule changes;
tests/packaging/test_alerts.py fails where the page is older than the rules. It needs PyYAML, of the extra `docs`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/alerts.md"
RULES = ROOT / "packaging/prometheus"
BASE = "https://healthd.example.org/docs/"  # what a site replaces
HEAD = """\
# Alerts

`scripts/alerts_page.py` wrote this page from `packaging/prometheus/healthd.alerts.yml`. On the machine of your
Prometheus (the files are in `/usr/share/healthd/prometheus` too):

```sh
cp packaging/prometheus/healthd.*.yml /etc/prometheus/
sed -i 's|https://healthd.example.org/docs|https://wiki.YOURS/healthd|' /etc/prometheus/healthd.alerts.yml
promtool check rules /etc/prometheus/healthd.*.yml
```

The second line says where your people find these pages: put `docs/` there. Name both files under `rule_files:` in
prometheus.yml, and call the job that scrapes healthd `healthd`; `packaging/prometheus/prometheus.yml` is an
example. `packaging/prometheus/alertmanager.yml` is one of how they are best routed: all of a node in one message.
Is your job called otherwise: `sed -i 's/job="healthd"/job="YOURS"/g'` in both files.

## What is told, and what is not

- **critical** wakes somebody: jobs are being lost now, or many nodes are broken or unseen. **warning** is a ticket:
  a node that healthd has drained waits for the morning. **info** is a list. ([Prometheus' own
  practice](https://prometheus.io/docs/practices/alerting/): as few alerts as possible, and only what a person can
  do something about.)
- Faults are told a node and a family, not a code: a GPU that falls off the bus gives five codes and one alert,
  which names them.
- One cause on many nodes is one alert: where 5 nodes and more than 2 % of the cluster have a problem, or more than
  half of it (2 nodes at least), `HealthdManyNodes` speaks after the time that the alert of one node waits, and while
  it does the alerts of the nodes are silent. A file server that dies under 2,000 nodes is one message.
- A node that does not answer gives `HealthdTargetDown` and nothing else.
- Faults of a node where healthd is paused are not told: somebody works there. A forgotten pause is told.
- Only what counts is a fault: confirmed, acknowledged by nobody, and from no log that users can forge. `healthd
  ack` is the way to silence one.
- A fault that becomes worse stays the same alert: `for:` does not begin anew.

What is wrong with which node, as one table: `healthd fleet status --problems`.

## Planned work

On nodes that stay up: `healthd pause --for 4h --why TEXT` on each; their faults are told to nobody until it ends.
Nodes that go down for less than 15 minutes (a rolling reboot) tell nobody either. For longer, silence them, and the
alert of many nodes with them:

```sh
amtool silence add --duration=4h --comment='new firmware' alertname=HealthdTargetDown node=~'gpu-(1|2|3)'
amtool silence add --duration=4h --comment='new firmware' alertname=HealthdManyNodes cluster=c1 problem=target_down
```

## All alerts

NODE, CODE and N are what stands there when it fires; the name leads to what to do.

"""
TAIL = """
### HealthdReloadFailed

healthd goes on with the settings it had; a restart would fail. On the node: `healthd config check
/etc/healthd/healthd.toml` names the file, the line and the setting. After the correction `systemctl reload
healthd`.

### HealthdStreamLoses

Lines wait in memory while the disk under `state_dir` takes none, and some were dropped: `df /var/lib/healthd`,
`dmesg | tail`. What was lost is missing in the fleet's history only: health and drains do not depend on it.
[events.md](events.md) says what is kept how.

### HealthdManyNodes

Look for what these nodes share before you look at one of them: a file server (`storage`), slurmctld or its network
(`slurm`, `target_down`), a switch (`network`), cooling or a power feed (`thermal`), a roll-out (`unknown`, `gpu`).
`healthd fleet status --problems` lists them. For shared causes healthd itself stops at its [fleet
limit](fleet-limit.md), so the cluster goes on; the nodes come back by themselves when the cause is over.

### HealthdManyNodesToTidy

The same for what loses no job tonight: settings that were refused (`reload`), drains and acknowledged faults that
nobody came back to (`drained_long`, `ack`), a disk that takes no events (`stream`), something that warns on all
nodes (`warning`: perhaps a threshold that is wrong here).

### HealthdNodesGone

The list of nodes of this cluster is empty or cut short, while others go on: look at its file under
`file_sd_configs`, and at what writes it (`packaging/prometheus/prometheus.yml` has a way that keeps the old file
where sinfo fails). A cluster that was really taken away: `amtool silence add --duration=1d
--comment='taken away' alertname=HealthdNodesGone cluster=c1`; after a day it is forgotten.

### HealthdNotScraped

Prometheus has no target of the job `healthd`. `promtool check config /etc/prometheus/prometheus.yml`; is the list
of nodes (`file_sd_configs`) there, and not empty? Is the job called otherwise, change its name in both rule files.
"""
_ACTION = re.compile(r"(\{\{.*?\}\})", re.S)


def alerts() -> list[dict[str, Any]]:
    """The alerts as Prometheus reads them, in their order."""
    groups = yaml.safe_load((RULES / "healthd.alerts.yml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def readable(template: str) -> str:
    """A text of a rule with words in place of what it looks up."""
    said, depth = [], 0
    for part in _ACTION.split(template):
        words = part.strip("{} \n").split() if part.startswith("{{") else []
        if not words:
            said.append(part if depth == 0 else "")
        elif words[0] in ("range", "with", "if"):
            said.append("..., " if words[0] == "range" and depth == 0 else "")
            depth += 1
        elif words[0] == "end":
            depth -= 1
        elif depth == 0:
            label = words[0].removeprefix("$labels.")
            said.append({"humanizeDuration": "TIME", "$value": "N"}.get(words[0], label.upper()))
    return (
        " ".join("".join(said).split())
        .replace("..., .", "...")
        .replace("..., type", "...; type")
        .replace(" ..., Look", " Look")
    )


def link(rule: dict[str, Any]) -> str:
    """Where its page is, from docs/."""
    url = str(rule["annotations"]["runbook_url"])
    path = url.removeprefix(BASE)
    return "runbooks/README.md" if "{{" in path else path.removeprefix("alerts.md")


def page() -> str:
    lines = ["| alert | severity, after | when | what to do |", "| --- | --- | --- | --- |"]
    waits: dict[str, list[str]] = {}  # an alert may be several rules, that differ in what they wait for
    for rule in alerts():
        waits.setdefault(rule["alert"], []).append(rule.get("for", "at once"))
    for rule in {rule["alert"]: rule for rule in alerts()}.values():
        after = ", " + " or ".join(waits[rule["alert"]])
        texts = (readable(rule["annotations"][name]).replace("|", "\\|") for name in ("summary", "description"))
        lines.append(f"| [{rule['alert']}]({link(rule)}) | {rule['labels']['severity']}{after} | {' | '.join(texts)} |")
    return HEAD + "\n".join(lines) + "\n" + TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
