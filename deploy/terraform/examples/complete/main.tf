# Seaquest as in the Ape-X paper with 192 actors, using every part: several zones, shards with volumes,
# TensorBoard for one office, alarms and a budget.

variable "keys_dir" {
  description = "Folder made by `troupe keys new DIR`."
  type        = string
}

variable "packer_manifest" {
  description = "Manifest that `packer build` wrote."
  type        = string
}

variable "region" {
  description = "Region to train in."
  type        = string
  default     = "us-east-1"
}

variable "tensorboard_cidrs" {
  description = "Blocks that may open TensorBoard."
  type        = list(string)
  default     = ["203.0.113.0/24"]
}

variable "alarm_email" {
  description = "Who is told of alarms."
  type        = string
  default     = "ada@example.org"
}

variable "actors" {
  description = "Actor processes; `make scale ACTORS=N` changes it."
  type        = number
  default     = 192
}

provider "aws" {
  region = var.region
}

module "troupe" {
  source = "../.."

  run             = "seaquest"
  preset          = "pong-apex-paper"
  overrides       = { "env.id" = "atari:seaquest", "run.seed" = "7" }
  keys_dir        = var.keys_dir
  packer_manifest = var.packer_manifest

  learner_instance_type = "g6.2xlarge"
  replay_shards         = 2
  replay_instance_type  = "r6i.xlarge"
  replay_volume_gb      = 50

  # 192 actor processes are 48 machines of four cores
  actors             = var.actors
  actors_per_machine = 4
  slots_per_actor    = 2
  max_actor_machines = 96

  availability_zones = ["${var.region}a", "${var.region}b"]
  tensorboard_cidrs  = var.tensorboard_cidrs

  alarm_email          = var.alarm_email
  budget_usd_per_month = 2000
  destroy_artifacts    = true
  tags                 = { Team = "research" }
}

output "troupe" {
  description = "All outputs of the module."
  value       = module.troupe
}
