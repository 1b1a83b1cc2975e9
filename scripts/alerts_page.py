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

Install the alert rules on your Prometheus host. The files are also in `/usr/share/healthd/prometheus`:

```sh
cp packaging/prometheus/healthd.*.yml /etc/prometheus/
sed -i 's|https://healthd.example.org/docs|https://wiki.YOURS/healthd|' /etc/prometheus/healthd.alerts.yml
promtool check rules /etc/prometheus/healthd.*.yml
```

The second command sets the address of these pages at your site: publish `docs/` there. List both files under
`rule_files:` in prometheus.yml, and name the scrape job `healthd`. For a job with another name, run
`sed -i 's/job="healthd"/job="YOURS"/g'` on both files. `packaging/prometheus/prometheus.yml` is an example.
`packaging/prometheus/alertmanager.yml` is an example that sends all alerts of a node in one message.

`scripts/alerts_page.py` writes this page from `packaging/prometheus/healthd.alerts.yml`.

## Severity and grouping

- **critical** wakes somebody: jobs are being lost now, or many nodes are broken or not monitored. **warning** is a
  ticket: a node that healthd has drained can wait until the morning. **info** is for a list. ([Prometheus' own
  practice](https://prometheus.io/docs/practices/alerting/): as few alerts as possible, and only those that a person
  can do something about.)
- Faults are grouped by node and family, not by code. A GPU that falls off the bus causes five codes and one alert,
  which names them.
- One cause on many nodes is one alert. `HealthdManyNodes` fires if 5 nodes and more than 2 % of the cluster have a
  problem, or more than half of the cluster (at least 2 nodes). It waits as long as the alert of a single node, and
  silences the alerts of the nodes. A file server that dies under 2,000 nodes is one message.
- A node that does not answer causes `HealthdTargetDown` and no other alert.
- Faults of a node on which healthd is paused cause no alert, because somebody works there. A forgotten pause does.
- A condition causes an alert only if it is confirmed, not acknowledged, and not from a log that users can forge.
  Silence a single condition with `healthd ack`.
- A fault that becomes worse remains the same alert: `for:` does not start again.

List the problems of all nodes in one table: `healthd fleet status --problems`.

## Planned work

If the nodes stay up, run `healthd pause --for 4h --why TEXT` on each. Their faults cause no alert until the pause ends.
Nodes that are down for less than 15 minutes (a rolling reboot) cause none either. For a longer outage, silence the
nodes, and the alert about many nodes:

```sh
amtool silence add --duration=4h --comment='new firmware' alertname=HealthdTargetDown node=~'gpu-(1|2|3)'
amtool silence add --duration=4h --comment='new firmware' alertname=HealthdManyNodes cluster=c1 problem=target_down
```

## All alerts

NODE, CODE and N stand for the actual values. Each name links to what to do.

"""
TAIL = """
### HealthdReloadFailed

healthd still runs with its previous settings, but a restart would fail. On the node, `healthd config check
/etc/healthd/healthd.toml` prints the file, the line and the setting. Correct it and run `systemctl reload healthd`.

### HealthdStreamLoses

The disk under `state_dir` accepts no writes. Lines of the event stream wait in memory, and some were dropped. Run
`df /var/lib/healthd` and `dmesg | tail`. The lost lines are missing only in the fleet's history; health and drains do
not depend on them. [events.md](events.md) describes what is kept.

### HealthdManyNodes

First find what these nodes share: a file server (`storage`), slurmctld or its network (`slurm`, `target_down`), a
switch (`network`), cooling or a power feed (`thermal`), a roll-out (`unknown`, `gpu`). `healthd fleet status
--problems` lists the nodes. For shared causes healthd stops draining at its [fleet limit](fleet-limit.md), so the
cluster stays in service. healthd resumes the nodes it drained when the cause is over.

### HealthdManyNodesToTidy

The same problem on many nodes, but no job is lost tonight: rejected settings (`reload`), drains and acknowledged faults
that were forgotten (`drained_long`, `ack`), a disk that accepts no events (`stream`), a warning on all nodes
(`warning`: perhaps a threshold that is wrong for your hardware).

### HealthdNodesGone

The target list of this cluster is empty or truncated, while other clusters are still scraped. Check its file under
`file_sd_configs` and the program that writes it. `packaging/prometheus/prometheus.yml` shows a way that keeps the old
file if sinfo fails. If the cluster was really removed, run `amtool silence add --duration=1d
--comment='removed' alertname=HealthdNodesGone cluster=c1`; the alert ends after a day.

### HealthdNotScraped

Prometheus has no target of the job `healthd`. Run `promtool check config /etc/prometheus/prometheus.yml`, and check
that the target list (`file_sd_configs`) exists and is not empty. If your job has another name, change it in both rule
files.
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
