# One image for everything: `docker run -p 127.0.0.1:8080:8080 quorumlog serve` is a whole cluster with its databases, and
# `docker run quorumlog services.bookie` one service, whose settings compose.yaml shows.
ARG PYTHON=python:3.11.13-slim-bookworm

# What installs and compiles stays in this stage.
FROM ${PYTHON} AS build
# run, or spark: with Spark and a Java for its jobs.
ARG LOCK=run
WORKDIR /app
COPY requirements/${LOCK}.lock requirements/
RUN python3 -m venv /venv \
    && /venv/bin/python -m pip install --no-cache-dir --require-hashes -r requirements/${LOCK}.lock \
    && /venv/bin/python -m pip uninstall -y pip setuptools
COPY services services
COPY shared shared
# A container with a read-only root compiles nothing itself.
RUN /venv/bin/python -m compileall -q --invalidation-mode unchecked-hash services shared

FROM ${PYTHON}
RUN rm -rf /usr/local/lib/python3*/site-packages/* /usr/local/lib/python3*/ensurepip /usr/local/bin/pip*
COPY --from=build /venv /venv
COPY --from=build /app /app
WORKDIR /app
ENV PATH=/venv/bin:$PATH PYTHONPATH=/app/shared:/app PYTHONDONTWRITEBYTECODE=1 HOST=0.0.0.0
COPY deploy/entrypoint /usr/local/bin/
RUN printf '#!/bin/sh\nexec python -m quorumlog.cli "$@"\n' > /usr/local/bin/quorumlog \
    && chmod 755 /usr/local/bin/quorumlog

# Bookies keep their entries in /data. What a cluster knows itself by is in /credentials, a volume for each role
# (compose.yaml). A new volume takes over the folder's owner and mode. Postgres, Prometheus and Grafana, which run as
# other users, read theirs as members of the group.
RUN useradd --uid 10001 quorumlog \
    && for role in authority metadata bookie gateway autorecovery operator monitor postgres grafana; \
        do install -d -m 750 -o quorumlog -g quorumlog /credentials/$role; done \
    && install -d -m 700 -o quorumlog -g quorumlog /data
USER quorumlog

STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/entrypoint"]
CMD ["services.gateway"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD python -m services.local.ready "http://127.0.0.1:${PORT:-8080}"
