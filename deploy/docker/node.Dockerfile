# A node: the agent, its supervisors and the engine, on torch's CUDA wheel. Give it GPUs with `--gpus all`.
#   docker build -f deploy/docker/node.Dockerfile -t orrery-node .
#   docker build -f deploy/docker/node.Dockerfile --build-arg ORRERY_TORCH=cpu -t orrery-node-cpu .
FROM python:3.11-slim
ARG ORRERY_TORCH=cuda
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 ORRERY_TORCH=${ORRERY_TORCH} ORRERY_HOME=/var/lib/orrery
WORKDIR /opt/orrery
COPY requirements requirements
COPY tools tools
RUN python tools/install.py
COPY workers workers
RUN useradd --system --create-home --home-dir /var/lib/orrery orrery
USER orrery
VOLUME /var/lib/orrery
# ORRERY_JOIN carries the one-time join token; the address is where other nodes reach this one
CMD ["sh", "-c", "exec python -m workers.agent --redis \"$REDIS_URL\" --home \"$ORRERY_HOME\" --name \"${NODE_NAME:-$(hostname)}\""]
