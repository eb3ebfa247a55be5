# One image for every service: `docker run <image> services.bookie`. compose.yaml shows the settings.
FROM python:3.11-slim

WORKDIR /app
COPY requirements/services.lock requirements/services.lock
RUN pip install --no-cache-dir --require-hashes -r requirements/services.lock

COPY services services
COPY shared shared
ENV PYTHONPATH=/app/shared:/app PYTHONDONTWRITEBYTECODE=1 HOST=0.0.0.0

# Bookies keep their entries in /data, a cluster its secret in /secret; a new volume takes over the folder's owner.
RUN useradd --uid 10001 quorumlog && mkdir -m 700 /data /secret && chown quorumlog /data /secret
USER quorumlog

ENTRYPOINT ["python", "-m"]
CMD ["services.gateway"]
HEALTHCHECK --interval=5s --start-period=30s CMD ["python", "-c", \
    "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"PORT\"]}/health/live', timeout=3)"]
