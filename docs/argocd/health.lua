-- Health of an LLMDeployment for Argo CD (argocd-cm: resource.customizations.health.millstream.dev_LLMDeployment).
-- docs/gitops.md says what each state means.
local health = {status = "Progressing", message = "Waiting for the operator to look at it."}

if obj.metadata.deletionTimestamp ~= nil then
  health.message = "Being deleted."
  return health
end
if obj.status == nil or obj.status.observedGeneration ~= obj.metadata.generation then
  return health
end

local found = {}
for _, condition in ipairs(obj.status.conditions or {}) do
  found[condition.type] = condition
end

local ready = found.Ready
if ready == nil then
  return health
end
health.message = ready.reason .. ": " .. ready.message
if found.Stalled ~= nil and found.Stalled.status == "True" then
  health.status = "Degraded"
  if ready.status == "True" then -- it serves, and new replicas need a person
    health.message = found.Stalled.reason .. ": " .. found.Stalled.message
  end
elseif found.Reconciling ~= nil and found.Reconciling.status == "True" then
  if ready.status == "True" then -- it serves while it is being scaled
    health.message = found.Reconciling.reason .. ": " .. found.Reconciling.message
  end
elseif ready.status == "True" and ready.reason == "ScaledToZero" then
  health.status = "Suspended"
elseif ready.status == "True" then
  health.status = "Healthy"
end
return health
