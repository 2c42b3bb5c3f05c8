#!/bin/sh
# What a container runs: the startup kit that is mounted at /kit, in the foreground. Arguments go to "medpfl site allow".
set -eu
medpfl site allow /kit "$@"
exec bash /kit/startup/sub_start.sh --once
