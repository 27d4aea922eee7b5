# A run of Troupe in AWS: learner, replay shards, actors and evaluator in a network of their own.
# It uses the provider's region (AWS_REGION, or a provider block around this module).

data "aws_region" "current" {}

data "aws_availability_zones" "available" {
  #checkov:skip=CKV_AWS_394:only the first is used, and only where availability_zones names none
  state = "available"

  # Local zones offer few instance types.
  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

locals {
  name       = "troupe-${var.run}"
  region     = data.aws_region.current.name
  parameters = "/troupe/${var.run}"
  domain     = "${var.run}.troupe.internal"
  zones      = length(var.availability_zones) > 0 ? var.availability_zones : slice(sort(data.aws_availability_zones.available.names), 0, 1)
  tags       = merge(var.tags, { Project = "troupe", Run = var.run })

  public_tensorboard = length(var.tensorboard_cidrs) > 0
  actor_machines     = ceil(var.actors / var.actors_per_machine)

  # Learners besides the one that has the run.
  peers = var.learners - 1
  roles = concat(["learner", "replay", "actor", "evaluator"], local.peers > 0 ? ["learner-peer"] : [])

  # Packer's manifest lists builds, the newest last; an artifact is "region:image,region:image".
  builds = var.packer_manifest == "" ? [] : jsondecode(file(var.packer_manifest)).builds
  built = { for kind in ["cpu", "gpu"] : kind => try(reverse(flatten([
    for build in local.builds : [
      for artifact in split(",", build.artifact_id) : split(":", artifact)[1] if split(":", artifact)[0] == local.region
    ] if try(build.custom_data.kind, "") == kind
  ]))[0], "") }
  cpu_image     = var.cpu_image_id != "" ? var.cpu_image_id : local.built.cpu
  learner_image = var.learner_device == "cpu" ? local.cpu_image : var.gpu_image_id != "" ? var.gpu_image_id : local.built.gpu

  run_file = var.run_file == "" ? "" : filebase64(var.run_file) # the parameter store takes no two braces in a row

  # What the preset says, but for what the machines decide.
  overrides = merge(
    {
      "run.name"          = var.run
      "actor.processes"   = tostring(var.actors_per_machine)
      "actor.slots"       = tostring(var.slots_per_actor)
      "actor.total_slots" = tostring(var.actors * var.slots_per_actor)
      "replay.shards"     = tostring(var.replay_shards)
      "learner.device"    = var.learner_device
      "evaluator.enabled" = tostring(var.evaluator)
    },
    # Gradients are not encrypted: security groups let nobody but learners connect to them.
    local.peers > 0 ? { "learner.processes" = tostring(var.learners), "net.learner_network" = var.vpc_cidr } : {},
    var.overrides,
  )

  # Who is scaled to nothing at the end of the run; the learner, who does it, comes last.
  groups = concat(
    ["${local.name}-actor"],
    var.evaluator ? ["${local.name}-evaluator"] : [],
    [for i in range(var.replay_shards) : "${local.name}-replay-${i}"],
    local.peers > 0 ? ["${local.name}-learner-peer"] : [],
    ["${local.name}-learner"],
  )

  run = {
    run         = var.run
    name        = local.name
    region      = local.region
    parameters  = local.parameters
    learner     = "tcp://learner.${local.domain}:5550"
    domain      = local.domain
    zone_arn    = module.network.zone_arn
    kms_key_arn = module.secrets.kms_key_arn
    tags        = local.tags
  }

  machines = { for role in local.roles : role => {
    image_id          = startswith(role, "learner") ? local.learner_image : local.cpu_image
    root_device       = startswith(role, "learner") && var.learner_device != "cpu" ? var.gpu_root_device : var.cpu_root_device
    security_group_id = module.security.group_ids[role]
    log_group         = module.observability.log_groups[role]
    secret_arn        = module.secrets.secret_arns[trimsuffix(role, "-peer")] # a learner is known by the learners' key
    public_address    = module.network.public_addresses || (role == "learner" && local.public_tensorboard)
  } }
}

module "secrets" {
  source = "./modules/secrets"

  name       = local.name
  region     = local.region
  parameters = local.parameters
  roles      = ["learner", "replay", "actor", "evaluator"]
  keys_dir   = var.keys_dir
  tags       = local.tags
}

module "artifacts" {
  source = "./modules/artifacts"

  name                   = local.name
  kms_key_arn            = module.secrets.kms_key_arn
  force_destroy          = var.destroy_artifacts
  keep_old_versions_days = var.keep_old_versions_days
  tags                   = local.tags
}

module "network" {
  source = "./modules/network"

  name               = local.name
  region             = local.region
  cidr               = var.vpc_cidr
  availability_zones = local.zones
  nat_gateway        = var.nat_gateway
  domain             = local.domain
  flow_logs          = module.observability.flow_logs
  tags               = local.tags
}

module "security" {
  source = "./modules/security"

  name              = local.name
  vpc_id            = module.network.vpc_id
  shards            = var.replay_shards
  learner_peers     = local.peers > 0
  tensorboard_cidrs = var.tensorboard_cidrs
  tags              = local.tags
}

module "learner" {
  source = "./modules/learner"

  run           = local.run
  machine       = local.machines.learner
  subnet_ids    = local.public_tensorboard ? module.network.public_subnet_ids : module.network.machine_subnet_ids
  instance_type = var.learner_instance_type
  disk_gb       = var.learner_disk_gb
  bucket_arn    = module.artifacts.arn
  public        = local.public_tensorboard
  running       = var.running
  may_stop      = var.stop_when_complete ? local.groups : []
}

# They share each batch with the first learner. One that is lost is missed for seconds, and its replacement copies its
# state from the others. Of the learner's rights they have its key.
module "learner_peers" {
  source = "./modules/group"
  count  = local.peers > 0 ? 1 : 0

  run            = local.run
  machine        = local.machines["learner-peer"]
  role           = "learner-peer"
  subnet_ids     = module.network.machine_subnet_ids
  instance_types = [var.learner_instance_type] # each update is as fast as the slowest of them
  disk_gb        = var.learner_disk_gb
  machines       = local.peers
  spot           = var.learner_peer_spot
  running        = var.running
}

module "replay" {
  source = "./modules/replay"

  run                = local.run
  machine            = local.machines.replay
  subnet_ids         = module.network.machine_subnet_ids
  availability_zones = local.zones
  shards             = var.replay_shards
  instance_type      = var.replay_instance_type
  disk_gb            = var.replay_disk_gb
  volume_gb          = var.replay_volume_gb
  running            = var.running
}

# They come and go, and flush what they hold when a spot machine's notice comes.
module "actors" {
  source = "./modules/group"

  run            = local.run
  machine        = local.machines.actor
  role           = "actor"
  subnet_ids     = module.network.machine_subnet_ids
  instance_types = var.actor_instance_types # all with about the same number of cores
  disk_gb        = var.actor_disk_gb
  machines       = local.actor_machines
  max_machines   = var.max_actor_machines
  spot           = var.actor_spot
  refresh        = true
  running        = var.running
}

# Nobody waits for it.
module "evaluator" {
  source = "./modules/group"
  count  = var.evaluator ? 1 : 0

  run            = local.run
  machine        = local.machines.evaluator
  role           = "evaluator"
  subnet_ids     = module.network.machine_subnet_ids
  instance_types = var.evaluator_instance_types
  disk_gb        = var.actor_disk_gb
  machines       = 1
  spot           = var.evaluator_spot
  running        = var.running
}

module "observability" {
  source = "./modules/observability"

  name                 = local.name
  run                  = var.run
  parameters           = local.parameters
  kms_key_arn          = module.secrets.kms_key_arn
  roles                = local.roles
  log_retention_days   = var.log_retention_days
  flow_logs            = var.flow_logs
  running              = var.running
  groups               = { learner = "${local.name}-learner", actors = "${local.name}-actor" }
  alarm_email          = var.alarm_email
  budget_usd_per_month = var.budget_usd_per_month
  tags                 = local.tags
}

# The end of all machines at a given time, whoever watches. The groups stay as large as they may be: a later `apply`
# starts them again. The learner's waits for its last copy, as it always does.
resource "aws_autoscaling_schedule" "stop" {
  for_each = toset(var.stop_at == "" ? [] : local.groups)

  scheduled_action_name  = "${each.value}-stop"
  autoscaling_group_name = each.value
  start_time             = var.stop_at
  min_size               = 0
  max_size               = -1
  desired_capacity       = 0

  depends_on = [module.learner, module.learner_peers, module.replay, module.actors, module.evaluator]
}

# What machines read at boot: everything but what makes a machine different from the others.
resource "aws_ssm_parameter" "config" {
  #checkov:skip=CKV2_AWS_34:nothing in it is secret, and every machine reads it
  #checkov:skip=CKV_AWS_337:as above
  name        = "${local.parameters}/config"
  description = "Description of the run ${var.run}"
  type        = "String"
  tier        = "Intelligent-Tiering" # a run file may take more than the 4 KB that are free
  tags        = local.tags

  value = jsonencode({
    preset     = var.preset
    run_file   = local.run_file
    overrides  = local.overrides
    modules    = var.modules
    bucket     = module.artifacts.bucket
    domain     = local.domain
    zone_id    = module.network.zone_id
    log_groups = module.observability.log_groups
    actor      = { processes = var.actors_per_machine }
    learner    = { address_allocation_id = module.learner.address_allocation_id, hook = module.learner.hook }
    replay     = { volumes = module.replay.volume_ids }
    groups     = var.stop_when_complete ? local.groups : []
  })

  lifecycle {
    precondition {
      condition     = local.cpu_image != "" && local.learner_image != ""
      error_message = "no image for this region: set packer_manifest, or cpu_image_id and (with a GPU) gpu_image_id."
    }
  }
}
