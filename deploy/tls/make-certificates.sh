#!/bin/sh
# Creates an authority and a certificate for the broker in this folder, for five years:
#   deploy/tls/make-certificates.sh broker redis.example.org 10.0.0.5
# Arguments are the names and addresses by which nodes and the control plane reach the broker.
# Copy ca.crt, and nothing else, to the nodes; keep ca.key offline.
set -eu
cd "$(dirname "$0")"
[ $# -gt 0 ] || { echo "usage: $0 NAME-OR-ADDRESS..." >&2; exit 2; }
umask 077
names=""
for name in "$@"; do
    case "$name" in
        *:* | [0-9]*.[0-9]*.[0-9]*.[0-9]*) names="${names:+$names,}IP:$name" ;;
        *) names="${names:+$names,}DNS:$name" ;;
    esac
done
if [ ! -f ca.key ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1825 \
        -subj "/CN=Orrery broker authority" -addext "keyUsage=critical,keyCertSign,cRLSign" \
        -keyout ca.key -out ca.crt
fi
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" \
    -keyout server.key -out server.csr
# Python from 3.13 on refuses certificates without the identifiers and usages of RFC 5280
cat > names.cnf <<END
subjectAltName=$names
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=serverAuth
subjectKeyIdentifier=hash
authorityKeyIdentifier=keyid
END
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 1825 \
    -extfile names.cnf -out server.crt
rm -f server.csr names.cnf
chmod 644 ca.crt server.crt
# the broker's container reads the key as another user (valkey, 999)
chown 999 server.key 2>/dev/null || echo "Give server.key to the broker's user: chown 999 server.key"
