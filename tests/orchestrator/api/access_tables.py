"""The rights to every REST operation and page, for `test_access_matrix`."""

from __future__ import annotations

# "METHOD path": the scope; then whose object it is about:
#   see     404 for callers outside the owner's teams
#   decide  as see; 403 for viewers
#   manage  as see; 403 for those who may see it but are neither its owner nor operator
#   change  everybody sees it; 403 for all but its owner and operators
#   team    as see; 403 for all but admins of the owner's team and administrators
#   own     404 for all but its owner and administrators
#   private 404 for all but its owner
REST = """
POST   v1/runs                                        runs
GET    v1/runs                                        read
GET    v1/runs/columns                                read
GET    v1/runs/csv                                    read
GET    v1/runs/groups                                 read
GET    v1/runs/parquet                                read
GET    v1/run-views                                   read
POST   v1/run-views                                   runs
DELETE v1/run-views/{int:id}                          runs    private
GET    v1/runs/{int:id}                               read    see
PATCH  v1/runs/{int:id}                               runs    manage
POST   v1/runs/check                                  runs
POST   v1/runs/from-bundle                            runs
GET    v1/runs/{int:id}/bundle                        read    see
GET    v1/runs/{int:id}/code                          read    see
POST   v1/runs/{int:id}/cancel                        runs    manage
POST   v1/runs/{int:id}/pause                         runs    manage
POST   v1/runs/{int:id}/resume                        runs    manage
POST   v1/runs/{int:id}/retry                         runs    manage
POST   v1/runs/{int:id}/checkpoint                    runs    manage
POST   v1/runs/{int:id}/profile                       runs    manage
POST   v1/runs/{int:id}/memory-snapshot               runs    manage
POST   v1/runs/{int:id}/clone                         runs    see
POST   v1/runs/{int:id}/checkpoints/{int:step}/pin    runs    manage
POST   v1/runs/{int:id}/checkpoints/{int:step}/unpin  runs    manage
POST   v1/runs/{int:id}/fork                          runs    see
GET    v1/runs/{int:id}/attempts                      read    see
GET    v1/runs/{int:id}/events                        read    see
POST   v1/runs/{int:id}/events                        ingest  manage
GET    v1/runs/{int:id}/checkpoints                   read    see
GET    v1/runs/{int:id}/artifacts                     read    see
GET    v1/runs/{int:id}/samples                       read    see
GET    v1/runs/{int:id}/artifacts/{int:artifact}/download  read  see
GET    v1/runs/{int:id}/logs                          read    see
POST   v1/runs/{int:id}/logs                          ingest  manage
POST   v1/runs/{int:id}/points                        ingest  manage
POST   v1/runs/{int:id}/finish                        ingest  manage
GET    v1/runs/{int:id}/series                        read    see
GET    v1/runs/{int:id}/curves                        read    see
GET    v1/runs/{int:id}/details                       read    see
PATCH  v1/runs/{int:id}/details                       ingest  manage
POST   v1/runs/{int:id}/details                       ingest  manage
GET    v1/runs/{int:id}/media                         read    see
POST   v1/runs/{int:id}/media                         ingest  manage
GET    v1/runs/{int:id}/media/{int:item}/file         read    see
GET    v1/runs/{int:id}/benchmark                     read    see
GET    v1/runs/{int:id}/plan-trials                   read    see
GET    v1/runs/{int:id}/produced                      read    see
GET    v1/runs/{int:id}/lines                         read    see
GET    v1/runs/{int:id}/lines/download                read    see
GET    v1/runs/{int:id}/answers                       read    see
GET    v1/runs/{int:id}/answers/download              read    see
GET    v1/runs/{int:id}/requests                      read    see
GET    v1/runs/{int:id}/results                       read    see
GET    v1/runs/{int:id}/answer-votes                  read    see
POST   v1/runs/{int:id}/answer-votes                  runs    see
GET    v1/runs/{int:id}/training-data                 read    see
GET    v1/runs/{int:id}/lineage                       read    see
GET    v1/runs/{int:id}/rollouts                      read    see
GET    v1/experiments                                 read
POST   v1/experiments                                 runs
GET    v1/experiments/{int:id}                        read    see
PATCH  v1/experiments/{int:id}                        runs    manage
GET    v1/sweeps                                      read
POST   v1/sweeps                                      runs
GET    v1/sweeps/{int:id}                             read    see
POST   v1/sweeps/{int:id}/cancel                      runs    manage
GET    v1/events                                      read
GET    v1/exports                                     read
POST   v1/exports                                     read
GET    v1/exports/{int:id}                            read    private
GET    v1/exports/{int:id}/download                   read    private
DELETE v1/exports/{int:id}                            read    private
GET    v1/datasets                                    read
POST   v1/datasets                                    runs
GET    v1/datasets/{name}                             read    see
GET    v1/datasets/{name}/{int:version}               read    see
DELETE v1/datasets/{name}/{int:version}               runs    manage
GET    v1/simulations                                 read
POST   v1/simulations                                 read
GET    v1/simulations/{int:id}                        read    private
DELETE v1/simulations/{int:id}                        read    private
GET    v1/usage                                       read
GET    v1/storage/candidates                          fleet
GET    v1/storage/copies                              fleet
GET    v1/storage/copies/candidates                   fleet
GET    v1/storage/store                               fleet
POST   v1/storage/store/check                         fleet
GET    v1/storage/deletions                           fleet
GET    v1/storage/folders                             fleet
GET    v1/dead-letters                                fleet
POST   v1/dead-letters/{int:id}/retry                 fleet
POST   v1/dead-letters/{int:id}/drop                  fleet
GET    v1/dashboards                                  read
POST   v1/dashboards                                  runs
GET    v1/dashboards/{int:id}                         read    see
PATCH  v1/dashboards/{int:id}                         runs    manage
DELETE v1/dashboards/{int:id}                         runs    manage
POST   v1/dashboards/{int:id}/panels                  runs    manage
POST   v1/panels/data                                 read
POST   v1/panels/expand                               read
POST   v1/panels/names                                read
GET    v1/queue                                       read
GET    v1/nodes                                       read
GET    v1/nodes/{id}                                  read
POST   v1/nodes/{id}/drain                            fleet
POST   v1/nodes/{id}/undrain                          fleet
POST   v1/nodes/{id}/confirm-lost                     fleet
POST   v1/nodes/{id}/cordon                           fleet
PUT    v1/nodes/{id}/topology                         fleet
POST   v1/nodes/{id}/uncordon                         fleet
GET    v1/nodes/{id}/cordons                          read
GET    v1/nodes/{id}/history                          read
GET    v1/fleet/history                               read
GET    v1/fleet/idle-devices                          read
GET    v1/fleet/energy                                read
GET    v1/nodes/{id}/probes                           read
POST   v1/nodes/{id}/probe                            fleet
GET    v1/nodes/{id}/preflight-rates                  read
DELETE v1/nodes/{id}                                  fleet
GET    v1/devices                                     read
GET    v1/pools                                       read
POST   v1/join-tokens                                 fleet
GET    v1/engines                                     read
POST   v1/engines                                     admin
GET    v1/engines/{name}                              read
PATCH  v1/engines/{name}                              admin
DELETE v1/engines/{name}                              admin
GET    v1/windows                                     read
POST   v1/queue/what-if                               fleet
POST   v1/windows                                     fleet
GET    v1/windows/{int:id}                            read
DELETE v1/windows/{int:id}                            fleet
PUT    v1/engines/{name}/pools/{pool}                 admin
DELETE v1/engines/{name}/pools/{pool}                 admin
GET    v1/presets                                     read
GET    v1/data/files                                  runs
GET    v1/data/preview                                runs
GET    v1/reviews                                     read
POST   v1/reviews                                     runs
GET    v1/reviews/{int:id}                            read    see
DELETE v1/reviews/{int:id}                            runs    manage
GET    v1/reviews/{int:id}/lines                      read    see
GET    v1/reviews/{int:id}/lines/{int:line}           read    see
PATCH  v1/reviews/{int:id}/lines/{int:line}           runs    see
GET    v1/reviews/{int:id}/lines/{int:line}/changes   read    see
POST   v1/reviews/{int:id}/next                       runs    see
GET    v1/reviews/{int:id}/data-sets                  read    see
POST   v1/reviews/{int:id}/data-sets                  runs    see
GET    v1/reviews/{int:id}/data-sets/{int:data_set}/download  read  see
GET    v1/model-comparisons                           read
POST   v1/model-comparisons                           runs
GET    v1/model-comparisons/votes                     read
GET    v1/model-comparisons/{int:id}                  read    see
GET    v1/model-comparisons/{int:id}/turns            read    see
POST   v1/model-comparisons/{int:id}/turns            runs    see
POST   v1/model-comparisons/{int:id}/turns/{int:turn}/vote  runs  see
POST   v1/model-comparisons/{int:id}/data-sets        runs    see
POST   v1/plans/estimate                              read
POST   v1/plans/search                                read
POST   v1/plans/export                                read
POST   v1/plans/serving                               read
POST   v1/plans/serving/simulate                      read
GET    v1/plans                                       read
POST   v1/plans                                       runs
GET    v1/plans/{int:id}                              read    see
DELETE v1/plans/{int:id}                              runs    manage
GET    v1/calibrations                                read
POST   v1/calibrations                                runs
GET    v1/calibrations/{int:id}                       read
PATCH  v1/calibrations/{int:id}                       runs    change
DELETE v1/calibrations/{int:id}                       runs    change
GET    v1/device-types                                read
POST   v1/device-types                                runs
GET    v1/device-types/{int:id}                       read    see
DELETE v1/device-types/{int:id}                       runs    manage
GET    v1/me                                          read
GET    v1/tokens                                      read
POST   v1/tokens                                      tokens
DELETE v1/tokens/{int:id}                             tokens  own
GET    v1/teams                                       read
POST   v1/teams                                       admin
GET    v1/teams/{int:id}                              read    see
PATCH  v1/teams/{int:id}                              runs    team
DELETE v1/teams/{int:id}                              admin   see
PUT    v1/teams/{int:id}/guarantees/{pool}            admin   see
PUT    v1/teams/{int:id}/members/{username}           runs    team
DELETE v1/teams/{int:id}/members/{username}           runs    team
GET    v1/audit/export                                admin
GET    v1/audit                                       admin
GET    v1/notifications                               read
POST   v1/notifications                               runs
DELETE v1/notifications/{int:id}                      runs    own
POST   v1/notifications/{int:id}/test                 runs    own
GET    v1/notifications/{int:id}/deliveries           read    own
GET    v1/reports                                     read
POST   v1/reports                                     runs
GET    v1/reports/{int:id}                            read    see
PATCH  v1/reports/{int:id}                            runs    see
DELETE v1/reports/{int:id}                            runs    manage
GET    v1/reports/{int:id}/versions                   read    see
GET    v1/reports/{int:id}/versions/{int:version}     read    see
POST   v1/reports/{int:id}/versions/{int:version}/restore  runs  see
GET    v1/reports/{int:id}/diff                       read    see
GET    v1/reports/{int:id}/comments                   read    see
POST   v1/reports/{int:id}/comments                   runs    see
PATCH  v1/reports/{int:id}/comments/{int:comment}     runs    see
DELETE v1/reports/{int:id}/comments/{int:comment}     runs    manage
GET    v1/reports/{int:id}/links                      read    see
POST   v1/reports/{int:id}/links                      runs    see
DELETE v1/reports/{int:id}/links/{int:link}           runs    see
GET    v1/alerts                                      read
POST   v1/alerts/{int:id}/acknowledge                 runs    see
GET    v1/alerts/mutes                                read
PUT    v1/alerts/mutes                                runs
DELETE v1/alerts/mutes                                runs
GET    v1/alert-rules                                 read
POST   v1/alert-rules                                 runs
PATCH  v1/alert-rules/{int:id}                        runs    private
DELETE v1/alert-rules/{int:id}                        runs    private
GET    v1/jobs                                        fleet
GET    v1/jobs/runs                                   fleet
POST   v1/jobs/{name}/run                             fleet
"""

# page name: the method; then the least role, or whose object it is about
PAGES = """
script-texts       GET   anyone
login              GET   anyone
logout             POST  anyone
oidc-login         POST  anyone
openid_connect_callback  GET  anyone
metrics            GET   anyone
health             GET   anyone
overview           GET
overview-pulse     GET
outages            GET
run                GET   see
run-pulse          GET   see
run-comparison     GET   see
run-heat           GET   see
run-timeline       GET   see
run-samples        GET   see
run-rollouts       GET   see
run-engine         GET   see
run-act            POST  see
run-fork           GET   see
gallery            GET
runs               GET
runs-bulk          POST
run-view-save      POST
run-view-delete    POST  private
runs-compare       GET
runs-compare-curves  GET
runs-compare-values  GET
run-bundle         GET   see
run-diff           GET   see
run-from-bundle    POST
run-new            GET
run-check          POST
fleet              GET
fleet-history      GET
node-history       GET
dead-letters       GET   operator
dead-letter-close  POST  operator
node-join          GET   operator
engines            GET
engine-change      POST  admin
node               GET
windows            GET
window-delete      POST  operator
node-topology      POST  operator
node-drain         GET   operator
node-undrain       POST  operator
node-confirm-lost  POST  operator
node-probe         POST  operator
node-cordon        POST  operator
node-uncordon      POST  operator
node-remove        GET   operator
queue              GET
queue-priority     POST  see
what-if            GET   operator
simulator          GET
simulation         GET   private
simulation-delete  POST  private
experiments        GET
experiment-new     POST  submitter
experiment         GET   see
experiment-edit    POST  manage
dashboards         GET
dashboard-new      POST  submitter
dashboard-add      POST  submitter
dashboard          GET   see
dashboard-panel    GET   see
dashboard-copy     POST  decide
dashboard-delete   POST  manage
sweeps             GET
sweep-new          POST  submitter
sweep              GET   see
sweep-cancel       POST  manage
assistant          GET   see
assistant-start    POST  submitter
solved-problems    GET
solved-problems-start  POST  submitter
data               GET   submitter
data-sets          GET
data-set           GET   see
data-set-version   GET   see
data-set-delete    POST  manage
reviews            GET
review             GET   see
review-write       POST  decide
review-delete      POST  manage
model-comparisons  GET
model-comparison   GET   see
model-comparison-write  POST  decide
planner            GET
planner-answer     GET
planner-shape      GET
planner-why        GET
planner-export     GET
planner-serving    GET
planner-serving-load  GET
planner-scaling    GET
planner-examples   GET
planner-accuracy   GET
planner-saved      GET
planner-save       POST  submitter
planner-forget     POST  manage
account            GET
password           GET
tokens             GET
token-revoke       POST  own
audit              GET
people             GET   admin
teams              GET
team               GET   see
team-change        POST  team
team-guarantee     POST  team-admin
team-delete        POST  team-admin
member-set         POST  team
member-remove      POST  team
role               POST  admin
settings           GET   operator
notifications      GET
reports            GET
report-new         POST  submitter
report-preview     POST  submitter
report             GET   see
report-edit        POST  decide
report-version     GET   see
report-versions    GET   see
report-restore     POST  decide
report-delete      POST  manage
report-comments    POST  decide
report-comment     POST  decide
report-share       GET   decide
report-share-revoke  POST  decide
shared-report      GET   anyone
alerts             GET
alert-mute         POST
alert-acknowledge  POST  decide
alert-rule-change  POST  private
notification-delete  POST  own
notification-test  POST  own
usage              GET
exports            GET
export-delete      POST  private
storage            GET   operator
store-check        POST  operator
jobs               GET   operator
job-run            POST  operator
"""
