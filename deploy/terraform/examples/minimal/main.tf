# The smallest run: CartPole on the CPU, public subnets without NAT gateway, two actors. About 20 cents an hour.

variable "keys_dir" {
  description = "Folder made by `troupe keys new DIR`."
  type        = string
}

variable "cpu_image_id" {
  description = "Image made by Packer."
  type        = string
}

variable "actors" {
  description = "Actor processes; `make scale ACTORS=N` changes it."
  type        = number
  default     = 2
}

module "troupe" {
  source = "../.."

  run      = "cartpole"
  preset   = "cartpole-apex"
  keys_dir = var.keys_dir

  cpu_image_id          = var.cpu_image_id
  learner_instance_type = "c6i.large"
  learner_device        = "cpu"
  learner_disk_gb       = 20
  replay_instance_type  = "t3.medium"
  replay_disk_gb        = 20

  actors               = var.actors
  actors_per_machine   = 2
  slots_per_actor      = 8
  actor_instance_types = ["c6i.large", "c6a.large"]

  nat_gateway          = false
  flow_logs            = false
  budget_usd_per_month = 50
}

output "troupe" {
  description = "All outputs of the module."
  value       = module.troupe
}
