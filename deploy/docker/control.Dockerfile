# The control plane: web, scheduler and ingest are this one image with different commands.
#   docker build -f deploy/docker/control.Dockerfile -t orrery-control .
FROM python:3.11-slim
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 ORRERY_HOME=/var/lib/orrery
WORKDIR /opt/orrery
COPY requirements/run.lock requirements/run.lock
# the control plane never loads torch, so none is installed here
RUN pip install --no-deps --require-hashes -r requirements/run.lock
COPY manage.py pyproject.toml ./
COPY orchestrator orchestrator
COPY webui webui
COPY workers/__init__.py workers/__init__.py
COPY workers/contracts workers/contracts
COPY workers/recorder workers/recorder
RUN python manage.py collectstatic --noinput --verbosity 0
RUN useradd --system --create-home --home-dir /var/lib/orrery orrery
USER orrery
VOLUME /var/lib/orrery
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/', timeout=4)"]
CMD ["sh", "-c", "exec uvicorn orchestrator.config.asgi:application --host 0.0.0.0 --port 8000 --no-access-log --proxy-headers --ws-max-size 65536 --ws-per-message-deflate false --workers ${ORRERY_WEB_PROCESSES:-1}"]
