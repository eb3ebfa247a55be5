#!/bin/sh
# The operator's container: creates and stores the first access token, and then runs so that
# `docker compose exec operator quorumlog …` can use it.
set -eu
umask 077
trap 'exit 0' TERM INT
token=/credentials/admin.token
if [ ! -s "$token" ]; then
    # Create the token at the metadata service, because gateways that require tokens reject a caller without a token.
    env -u QUORUMLOG_TOKEN_FILE quorumlog token create operator 'admin:*' --metadata "$METADATA_URLS" > "$token.new"
    mv "$token.new" "$token"
fi
sleep infinity &
wait
