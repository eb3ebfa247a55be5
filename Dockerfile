# The image of all services. `docker run -p 127.0.0.1:8080:8080 quorumlog serve` runs a whole cluster with its databases, and
# `docker run quorumlog services.bookie` runs one service, with the settings that compose.yaml shows.
ARG PYTHON=python:3.11.13-slim-bookworm

# Only this stage contains tools that install and compile.
FROM ${PYTHON} AS build
# The lock file: run, or spark, which adds Spark and a Java runtime for its jobs.
ARG LOCK=run
WORKDIR /app
COPY requirements/${LOCK}.lock requirements/
RUN python3 -m venv /venv \
    && /venv/bin/python -m pip install --no-cache-dir --require-hashes -r requirements/${LOCK}.lock \
    && /venv/bin/python -m pip uninstall -y pip setuptools
COPY services services
COPY shared shared
# Compile now, because a container with a read-only root can't store compiled files.
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

# Bookies store their entries in /data. Certificates and passwords are in /credentials, with a volume for each role
# (compose.yaml). A new volume takes over the folder's owner and mode. Postgres, Prometheus and Grafana run as other users,
# and read their credentials as members of the group.
RUN useradd --uid 10001 quorumlog \
    && for role in authority metadata bookie gateway autorecovery operator monitor postgres grafana; \
        do install -d -m 750 -o quorumlog -g quorumlog /credentials/$role; done \
    && install -d -m 700 -o quorumlog -g quorumlog /data
USER quorumlog

STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/entrypoint"]
CMD ["services.gateway"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD python -m services.local.ready "http://127.0.0.1:${PORT:-8080}"
