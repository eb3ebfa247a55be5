#!/bin/sh
# Keeps the first access token, and waits for `docker compose exec operator quorumlog …`.
set -eu
umask 077
trap 'exit 0' TERM INT
token=/credentials/admin.token
if [ ! -s "$token" ]; then
    # Made at the metadata service: gateways that require tokens let nobody in who has none.
    env -u QUORUMLOG_TOKEN_FILE quorumlog token create operator 'admin:*' --metadata "$METADATA_URLS" > "$token.new"
    mv "$token.new" "$token"
fi
sleep infinity &
wait
