"""Django's settings, made from `env/`. Reads no environment variable itself."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from orchestrator.config.env import derived
from orchestrator.config.env import read as environment

BASE_DIR = Path(__file__).resolve().parent.parent.parent
ENV = environment.read()

SECRET_KEY = derived.secret_key(ENV)
SECRET_KEY_FALLBACKS = list(ENV.secret_key_fallbacks)
DEBUG = ENV.debug
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]", ENV.host, *ENV.allowed_hosts]
CSRF_TRUSTED_ORIGINS = list(ENV.trusted_origins)

INSTALLED_APPS = [
    "orchestrator.config",
    "orchestrator.common",
    "orchestrator.accounts",
    "orchestrator.dead_letters",
    "orchestrator.fleet",
    "orchestrator.planner",
    "orchestrator.runs",
    "orchestrator.device_history",
    "orchestrator.telemetry",
    "orchestrator.tracking",
    "orchestrator.reviews",
    "orchestrator.run_table",
    "orchestrator.scheduling",
    "orchestrator.sweeps",
    "orchestrator.alerts",
    "orchestrator.dashboards",
    "orchestrator.reports",
    "orchestrator.background_jobs",
    "webui",
    "ninja",  # serves the API documentation page from our static files
    "django_htmx",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "orchestrator.config.compression.CompressionMiddleware",
    "orchestrator.config.security_headers.content_security_policy",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]

AUTHENTICATION_BACKENDS = ["django.contrib.auth.backends.ModelBackend"]
if ENV.oidc_issuer:  # login by an identity provider; without it nothing of allauth is loaded
    INSTALLED_APPS += [
        "allauth",
        "allauth.account",
        "allauth.socialaccount",
        "allauth.socialaccount.providers.openid_connect",
    ]
    MIDDLEWARE += ["allauth.account.middleware.AccountMiddleware"]
    AUTHENTICATION_BACKENDS += ["allauth.account.auth_backends.AuthenticationBackend"]
    ACCOUNT_ADAPTER = "webui.oidc.adapters.AccountAdapter"
    ACCOUNT_EMAIL_VERIFICATION = "none"
    SOCIALACCOUNT_ADAPTER = "webui.oidc.adapters.ProviderAdapter"
    SOCIALACCOUNT_PROVIDERS = {
        "openid_connect": {
            "APPS": [
                {
                    "provider_id": "sso",
                    "name": ENV.oidc_name,
                    "client_id": ENV.oidc_client_id,
                    "secret": ENV.oidc_client_secret,
                    "settings": {
                        "server_url": ENV.oidc_issuer,
                        "oauth_pkce_enabled": True,
                        "scope": list(ENV.oidc_scopes),
                    },
                }
            ]
        }
    }

ROOT_URLCONF = "orchestrator.config.urls"
ASGI_APPLICATION = "orchestrator.config.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    }
]

DATABASES = {"default": derived.database(ENV)}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
# `up` sets REDIS_URL for its children
REDIS_URL = ENV.redis_url or f"unix://{ENV.home / 'valkey' / 'valkey.sock'}"

AUTH_USER_MODEL = "accounts.User"
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "overview"
LOGOUT_REDIRECT_URL = "login"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
SESSION_COOKIE_SAMESITE = "Lax"
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
if ENV.behind_https:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = True
    SECURE_HSTS_SECONDS = ENV.hsts_s

_MAIL = urlsplit(ENV.smtp_url)
EMAIL_HOST, EMAIL_PORT = _MAIL.hostname or "", _MAIL.port or 25
EMAIL_HOST_USER = unquote(_MAIL.username or "")
EMAIL_HOST_PASSWORD = unquote(_MAIL.password or "")
EMAIL_USE_SSL, EMAIL_USE_TLS = _MAIL.scheme == "smtps", _MAIL.scheme == "smtp+tls"
DEFAULT_FROM_EMAIL = ENV.mail_from

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
USE_I18N = True
LOCALE_PATHS = [BASE_DIR / "webui" / "locale"]

STATIC_URL = "/static/"
# The images run `manage.py collectstatic`, which compresses once; a checkout skips that step.
COLLECTED = BASE_DIR / "staticfiles"
WHITENOISE_USE_FINDERS = not COLLECTED.is_dir()
STATIC_ROOT = (
    COLLECTED if COLLECTED.is_dir() or "collectstatic" in sys.argv else ENV.home / "static"
)
STATICFILES_FINDERS = [
    "webui.bundling.finder.BundleFinder",  # before the others: it has other forms of the same files
    "django.contrib.staticfiles.finders.AppDirectoriesFinder",
]
BUNDLES = ENV.home / "bundles"
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedStaticFilesStorage"},
}
WHITENOISE_MAX_AGE = 3600


PLOTLY_BUNDLE = "plotly-orrery.min.js"  # in webui/static/plotly, built by tools/plotly

WEB_THREADS = ENV.web_threads
WEB_QUEUE = ENV.web_queue
WEB_WAIT_S = ENV.web_wait_s
DATA_UPLOAD_MAX_MEMORY_SIZE = int(ENV.max_body_mb * 1e6)
DATA_ROOTS = list(ENV.data_roots) or [ENV.home / "data"]

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["console"], "level": "INFO"},
    "loggers": {
        "django.request": {"level": "ERROR"},
        "httpx": {"level": "WARNING"},
    },
}
