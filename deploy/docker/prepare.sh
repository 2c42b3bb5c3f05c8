#!/bin/sh
# Startup kits and generated data for the federation of compose.yml: prepare.sh FOLDER
# Afterwards FOLDER has a folder for each party with what is mounted into its container, and centre/ with the root key.
set -eu
cd "$1"
if [ -e centre ]; then
  echo "$1 is prepared already; remove what is in it to begin anew" >&2
  exit 1
fi
medpfl provision --example project.yml
sed -i '/default_host/d' project.yml # the containers find the server by its name
medpfl provision --project project.yml -o centre
kits=centre/medpfl/prod_00
medpfl demo phantom data
for site in hospital-a hospital-b hospital-c hospital-d; do
  mkdir -p "$site/home" "$site/data"
  mv "$kits/$site" "$site/kit"
  mv "data/$site" "data/$site.yaml" "$site/data/"
  medpfl site forbid-code "$site/kit"
done
mkdir -p server/home lead admin
mv "$kits/server.example.org" server/kit
mv "$kits/lead@hospital-a.example.org" lead/kit
mv "$kits/admin@example.org" admin/kit
mkdir -p lead/kit/transfer
cp -r "$(python3 -c 'from medpfl.bundle import find_job; print(find_job("softpull_phantom"))')" lead/kit/transfer/
