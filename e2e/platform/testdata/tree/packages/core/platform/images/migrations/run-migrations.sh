#!/bin/sh
set -euo pipefail
. /migrations/lib/log.sh
i=$CURRENT_VERSION
while [ "$i" -lt "$TARGET_VERSION" ]; do
  log "migration $i"
  "/migrations/$i"
  i=$((i + 1))
done
