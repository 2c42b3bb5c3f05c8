#!/bin/sh
# What a container runs: the startup kit that is mounted at /kit, in the foreground. Arguments go to "medpfl site allow",
# which a relay does without: it builds nothing that a job names.
set -eu
if [ ! -f /kit/startup/fed_relay.json ]; then
  medpfl site allow /kit "$@"
fi
exec bash /kit/startup/sub_start.sh --once
