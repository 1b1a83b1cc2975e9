"""Write docs/alerts.md: the alerts of packaging/prometheus as a table.

Run it after a rule changes; tests/packaging/test_alerts.py fails if the page is outdated. The script needs PyYAML (`pip
install -e '.[docs]'`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/alerts.md"
RULES = ROOT / "packaging/prometheus"
BASE = "https://healthd.example.org/docs/"  # a site replaces this
HEAD = """\
# Alerts

## Install the rules

On your Prometheus server (the files are also in `/usr/share/healthd/prometheus`):

```sh
cp packaging/prometheus/healthd.*.yml /etc/prometheus/
sed -i 's|https://healthd.example.org/docs|https://wiki.YOURS/healthd|' /etc/prometheus/healthd.alerts.yml
promtool check rules /etc/prometheus/healthd.*.yml
```

The second line sets the address of the runbooks; publish `docs/` there. Then:

1. List both files under `rule_files:` in prometheus.yml. `packaging/prometheus/prometheus.yml` is an example.
2. Name the scrape job `healthd`. If your job has another name, run
   `sed -i 's/job="healthd"/job="YOURS"/g'` on both files.
3. Route the alerts: `packaging/prometheus/alertmanager.yml` is an example that sends one message per node.

`scripts/alerts_page.py` writes this page from `packaging/prometheus/healthd.alerts.yml`.

## Rules of alerting

- **critical** pages someone: jobs are being lost now, or many nodes are broken or not monitored. **warning** is a
  ticket: a node that healthd has drained waits until the morning. **info** is for review. Prometheus recommends few
  and actionable alerts ([alerting practices](https://prometheus.io/docs/practices/alerting/)).
- The alert for a fault names the codes and parts. It states whether the node is drained and why, how many jobs healthd
  has requeued within the last hour, and whether someone must act tonight.
- There is one alert per node and code family. A GPU that falls off the bus opens five codes but triggers one alert.
- One cause on many nodes triggers one alert. If at least 5 nodes and more than 2 % of the cluster have a problem, or
  more than half of the cluster (at least 2 nodes), `HealthdManyNodes` fires after the same time as a single node's
  alert and replaces the nodes' own alerts. A file server failure that affects 2,000 nodes sends one message.
- A fault of an NVLink domain's switches (GB200, GB300) triggers one alert, `HealthdNvlinkDomainFault`, if at least 3
  nodes of the domain report link faults that began at about the same time. It replaces the nodes' own alerts for this
  fault, including those for a GPU reset that the driver requests, and `HealthdFleetLimitReached` for the domain's
  limit. Other faults of the nodes still alert.
- A node that does not respond triggers only `HealthdTargetDown`, and `HealthdRepairStuck` if healthd was repairing it.
  The example for Alertmanager sends only the second one then.
- Faults do not trigger alerts while healthd is paused on the node. A forgotten pause does.
- A condition triggers an alert only if it is confirmed, not acknowledged, and not from a log that users can forge.
  `healthd ack` silences a condition's alert.
- If a fault becomes worse, the same alert continues and its `for:` does not restart.

`healthd fleet status --problems` shows all nodes with problems as one table.

## Planned work

For nodes that stay up, run `healthd pause --for 4h --why TEXT` on each; their faults trigger no alerts until the pause
ends. Nodes that are down for less than 15 minutes (a rolling reboot) do not trigger alerts either. For longer work,
silence both the nodes' alert and the alert for many nodes:

```sh
amtool silence add --duration=4h --comment='new firmware' alertname=HealthdTargetDown node=~'gpu-(1|2|3)'
amtool silence add --duration=4h --comment='new firmware' alertname=HealthdManyNodes cluster=c1 problem=target_down
```

## All alerts

In an alert, NODE, CODE and N are replaced with values; "..." is a list. Texts about drains and requeued jobs
depend on the node's state and are omitted here. The alert's name links to its runbook.

"""
TAIL = """
### HealthdReloadFailed

healthd continues with its old settings; a restart would fail. On the node, `healthd config check
/etc/healthd/healthd.toml` prints the file, the line and the setting. After correcting the file, run `systemctl
reload healthd`.

### HealthdStreamLoses

Lines wait in memory while the disk under `state_dir` rejects writes, and some have been dropped. Check `df
/var/lib/healthd` and `dmesg | tail`. The lost lines are missing only in the fleet's history; health and drains do not
depend on them. [events.md](events.md) describes what is kept.

### HealthdEvidenceFailed

The file of the last fault is missing or incomplete. `healthd status` prints the reason below "Problems with healthd": a
full disk (less than 64 MiB are free), a collector that systemd no longer starts (`systemctl reset-failed
healthd-evidence.path healthd-evidence.service; systemctl restart healthd-evidence.path`), or a directory that other
users may write to.
[evidence.md](evidence.md) describes what is saved and when.

### HealthdManyNodes

Find what these nodes share before you inspect a single node: a file server (`storage`), slurmctld or its network
(`slurm`, `target_down`), a switch (`network`), cooling or a power feed (`thermal`), a roll-out (`unknown`, `gpu`).
`healthd fleet status --problems` lists the nodes. healthd drains nodes for a shared cause only up to its [fleet
limit](fleet-limit.md), so the cluster keeps running. healthd resumes the nodes when the cause is gone.

### HealthdManyNodesToTidy

As HealthdManyNodes, but for problems that cost no jobs: rejected settings (`reload`), forgotten drains and
acknowledged faults (`drained_long`, `ack`), repairs that failed or are late (`repair_failed`, `repair_stuck`), a disk
that rejects writes (`stream`, `evidence`), a hook that fails (`hook`), or a warning on all nodes (`warning`, perhaps
because a threshold does not fit this cluster).

### HealthdNodesGone

This cluster's node list is empty or truncated, while other clusters are complete. Check its file under
`file_sd_configs` and the job that writes the file; `packaging/prometheus/prometheus.yml` shows how to keep the old
file if sinfo fails. If the cluster was removed on purpose: `amtool silence add --duration=1d
--comment='removed' alertname=HealthdNodesGone cluster=c1`. The alert ends after a day.

### HealthdNotScraped

Prometheus has no targets for the job `healthd`. Run `promtool check config /etc/prometheus/prometheus.yml`, and check
that the node list (`file_sd_configs`) exists and is not empty. If your job has another name, change the name in
both rule files.
"""
_ELLIPSES = re.compile(r"\.{3,}(?: ?\.{3,})*")
_ACTION = re.compile(r"(\{\{.*?\}\})", re.S)


def alerts() -> list[dict[str, Any]]:
    """Return the alerts in the order of the file."""
    groups = yaml.safe_load((RULES / "healthd.alerts.yml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def readable(template: str) -> str:
    """Return the text of a rule.

    Words replace values that are looked up, "..." replaces lists, and conditions are dropped.
    """
    parts, depth = [], 0
    for part in _ACTION.split(template):
        template_words = part.strip("{} \n").split() if part.startswith("{{") else []
        if not template_words:
            parts.append(part if depth == 0 else "")
        elif template_words[0] in ("range", "with", "if"):
            listed = "CODE PART" if "topk(1, condition:" in part else "..."
            parts.append(listed if template_words[0] == "range" and depth == 0 else "")
            depth += 1
        elif template_words[0] == "end":
            depth -= 1
        elif depth == 0:
            label = template_words[0].removeprefix("$labels.")
            parts.append({"humanizeDuration": "TIME", "$value": "N"}.get(template_words[0], label.upper()))
    return _ELLIPSES.sub("...", " ".join("".join(parts).split()))


def link(rule: dict[str, Any]) -> str:
    """Return the path of the runbook, relative to docs/."""
    url = str(rule["annotations"]["runbook_url"])
    path = url.removeprefix(BASE)
    return "runbooks/README.md" if "{{" in path else path.removeprefix("alerts.md")


def page() -> str:
    lines = ["| alert | severity, after | when | what to do |", "| --- | --- | --- | --- |"]
    waits: dict[str, list[str]] = {}  # one alert may have several rules with different `for:`
    for rule in alerts():
        waits.setdefault(rule["alert"], []).append(rule.get("for", "at once"))
    for rule in {rule["alert"]: rule for rule in alerts()}.values():
        after = ", " + " or ".join(waits[rule["alert"]])
        texts = (readable(rule["annotations"][name]).replace("|", "\\|") for name in ("summary", "description"))
        lines.append(f"| [{rule['alert']}]({link(rule)}) | {rule['labels']['severity']}{after} | {' | '.join(texts)} |")
    return HEAD + "\n".join(lines) + "\n" + TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
