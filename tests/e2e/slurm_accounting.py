"""slurmdbd with its own MariaDB for a SlurmCluster, so that sacct and sacctmgr work. It adds 5 s to the start."""

from __future__ import annotations

import subprocess
from pathlib import Path

PACKAGES = "slurmdbd mariadb-server-core mariadb-client-core"
PROGRAMS = ("slurmdbd", "mariadbd", "mariadb", "mariadb-install-db")

SLURM_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={directory}/munge/munge.sock
"""
SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={directory}/munge/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=root
StorageLoc=slurm_acct
LogFile={directory}/log/slurmdbd.log
PidFile={directory}/slurmdbd.pid
"""


def write_slurmdbd_conf(directory: Path, port: int, plugins: Path | None = None) -> None:
    """Write slurmdbd.conf. `plugins`: their directory if it is not the default."""
    conf = directory / "slurmdbd.conf"
    conf.touch(mode=0o600)
    plugin_line = f"PluginDir={plugins}\n" if plugins else ""
    conf.write_text(SLURMDBD_CONF.format(directory=directory, port=port, database_port=port + 1) + plugin_line)


def make_database(directory: Path) -> None:
    data_dir = directory / "database"
    command = ("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data_dir}", "--skip-test-db")
    more_options = ("--auth-root-authentication-method=normal", "--innodb-log-file-size=8M")
    subprocess.run((*command, *more_options), stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=600)


def mariadbd_command(directory: Path, port: int) -> tuple[str, ...]:
    """Return the command of a MariaDB on a socket and on loopback. It flushes lazily: only test data can be lost."""
    data_dir = directory / "database"
    return (
        *(
            "mariadbd",
            "--no-defaults",
            "--user=root",
            f"--datadir={data_dir}",
            f"--socket={data_dir}/s",
            f"--pid-file={data_dir}/pid",
        ),
        *("--bind-address=127.0.0.1", f"--port={port + 1}", "--skip-name-resolve", "--skip-networking=0"),
        *("--innodb-buffer-pool-size=64M", "--innodb-log-file-size=8M", "--innodb-flush-log-at-trx-commit=0"),
        "--innodb-lock-wait-timeout=900",
    )
